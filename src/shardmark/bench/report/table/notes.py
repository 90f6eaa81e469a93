"""Notes below the tables: short sentences, cautions first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

from shardmark.base.metrics import FEW_STEPS, METRICS
from shardmark.base.results.schema import StabilityKind
from shardmark.base.results.verification import numerics_text
from shardmark.base.statistics.intervals import ROBUST_FROM
from shardmark.base.table.table import metric_column
from shardmark.base.text import counted, listed
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.analysis.compare.rows import Row, batch_norms_differ, grouped
from shardmark.bench.analysis.compare.verdicts import FAMILY_ERROR_RATE, quality_of
from shardmark.bench.analysis.diagnose.stability import Instability, warnings_of
from shardmark.bench.analysis.trial.rank_metrics import EMPTY_EVALUATION

EXPECTED = ("samples_per_second", "peak_memory_bytes")
"""Metrics whose absence gets a note; the reasons for others are in JSON."""
MOST_LINES = 6
"""Largest number of lines of notes on a screen, with the line that counts the others."""
INDENT = 6
"""Columns of a line that its indent and the break between words leave empty."""
MOST_NAMED = 3
"""Largest number of rows that a note names."""


class NoteKind(StrEnum):
    """Subjects of notes, in the order in which notes are printed."""

    EMPTY = "empty"
    FAILURE = "failure"
    DAMAGED = "damaged"
    UNFINISHED = "unfinished"
    UNSTABLE = "unstable"
    NOT_EQUIVALENT = "not equivalent"
    OTHER_NUMERICS = "other numerics"
    GAP = "gap"
    LABEL = "label"
    RELATION = "relation"
    REPEATS = "repeats"
    VERDICTS = "verdicts"


ESSENTIAL = (NoteKind.EMPTY, NoteKind.FAILURE, NoteKind.DAMAGED, NoteKind.NOT_EQUIVALENT)
"""Subjects that are always shown."""


class Note(NamedTuple):
    """A note of one or two sentences below the table."""

    kind: NoteKind
    text: str


def notes_of(
    comparison: Comparison, warnings: Sequence[Instability] | None = None
) -> tuple[Note, ...]:
    """Return the notes, most important first; `warnings` are computed if they are not given."""
    rows = comparison.rows
    labels = tuple(row.label for row in rows)  # a strategy's name keeps its case
    begun = counted(len(comparison.missing), "trial")
    unfinished = [f"Begun without a result: {begun}."] if comparison.missing else []
    parts = {
        NoteKind.EMPTY: [] if rows else ["No trial has a result."],
        NoteKind.FAILURE: _by_place(
            (f"{failed.count} x {failed.outcome}: {failed.reason}", row.place)
            for row in rows
            for failed in row.failed
        ),
        NoteKind.DAMAGED: [f"Damaged, left out: {damaged}" for damaged in comparison.damaged],
        NoteKind.UNFINISHED: unfinished,
        NoteKind.UNSTABLE: _unstable(warnings_of(comparison) if warnings is None else warnings),
        NoteKind.NOT_EQUIVALENT: [
            f"NOT EQUIVALENT: {text}."
            for text in _by_place(
                (row.deviation or "the cause is not known", row.place)
                for row in rows
                if row.equivalent is False
            )
        ],
        NoteKind.OTHER_NUMERICS: [
            f"{listed(names, most=len(names))}:"
            f" {numerics_text([text], 'their' if len(names) > 1 else 'its')}."
            for text, names in grouped(
                ("; ".join(row.mathematics), row.label) for row in rows if row.mathematics
            ).items()
        ],
        NoteKind.GAP: _gaps([row for row in rows if row.ok_trials]),
        NoteKind.LABEL: _labels(rows),
        NoteKind.RELATION: [
            f"{note if note.startswith(labels) else note[:1].upper() + note[1:]}."
            for note in comparison.notes
        ],
        NoteKind.REPEATS: [*_repeats(rows), *seeds_note(rows)],
        NoteKind.VERDICTS: _verdicts(rows),
    }
    return tuple(Note(kind, text) for kind in NoteKind for text in parts[kind])


def brief_notes(comparison: Comparison, width: int) -> tuple[str, ...]:
    """Return the notes for a screen: what failed, and up to six lines in total of the others.

    A disturbance that the answers name is not repeated.
    """
    disturbed = any(row.disturbed for row in comparison.rows)
    warnings = [
        warning
        for warning in warnings_of(comparison)
        if not (disturbed and warning.kind is StabilityKind.OTHER_PROCESSES)
    ]
    notes = notes_of(comparison, warnings)
    lines = [math.ceil(len(note.text) / max(1, width - INDENT)) for note in notes]
    room = MOST_LINES if sum(lines) <= MOST_LINES else MOST_LINES - 1
    texts = [
        note.text
        for note, end in zip(notes, accumulate(lines), strict=True)
        if note.kind in ESSENTIAL or end <= room
    ]
    rest = len(notes) - len(texts)
    more = [f"{counted(rest, 'more note')}: shardmark compare --wide"] if rest else []
    return (*texts, *more)


def seeds_note(rows: Sequence[Row]) -> list[str]:
    """Return notes on the seeds of the qualities: their number, and verdicts on differences."""
    qualities = [name for name, metric in METRICS.items() if metric.group == "quality"]
    repeated = [
        row
        for row in rows
        if not row.synthetic and any(row.metrics.get(name) is not None for name in qualities)
    ]
    if not repeated:
        return []
    counts = sorted({row.seeds for row in repeated})
    if counts == [1]:
        return ["Qualities are from one seed: measure.seeds=4 shows how they vary."]
    number = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    notes = [f"Qualities are means over {number} seeds, with intervals over the seeds."]
    differences: dict[tuple[str, str], list[str]] = {}
    for row in repeated:
        name, difference = quality_of(row), row.quality_difference
        if name is not None and difference is not None:
            column = metric_column(name, interval="±")
            unit = f" {column.difference_unit}" if column.unit else ""
            sign = "+" if difference.estimate.value > 0 else ""
            text = f"{row.place} {sign}{column.show(difference.estimate)}{unit}"
            key = (column.title, row.baseline or "")
            differences.setdefault(key, []).append(f"{text}, {row.quality_verdict}")
    return notes + [
        f"{title} minus that of {baseline}: {'; '.join(texts)}."
        for (title, baseline), texts in differences.items()
    ]


def left_out(rows: Sequence[Row]) -> list[str]:
    """Return a note that names the trials that did not end ok and count in no number."""
    names = [
        f"{row.place} ({', '.join(f'{group.count} x {group.outcome}' for group in row.failed)})"
        for row in rows
        if row.failed
    ]
    return [f"Left out, not ok: {'; '.join(names)}."] if names else []


def by_reason(findings: Iterable[tuple[str, str]], count: int) -> list[str]:
    """Return each text once, with its places unless these are all `count` places."""
    return [
        f"{text}." if len(places) == count else f"{text} ({'; '.join(places)})."
        for text, places in grouped(findings).items()
    ]


def _by_place(findings: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{'; '.join(places)}: {text}" for text, places in grouped(findings).items()]


def _unstable(warnings: Sequence[Instability]) -> list[str]:
    """Return a line for each kind of warning: the worst, the number of others, the remedy."""
    counts = Counter(warning.kind for warning in warnings)
    worst = {warning.kind: warning for warning in reversed(warnings)}
    return [
        f"Unstable: {worst[kind].place}: {worst[kind].text}{more}; {worst[kind].remedy}."
        for kind, count in counts.items()
        for more in (f" ({counted(count - 1, 'more such sign')})" if count > 1 else "",)
    ]


def _gaps(measured: Sequence[Row]) -> list[str]:
    missing = [
        (f"no {name}: {row.missing[name]}", row.place)
        for row in measured
        for name in (*EXPECTED, "validation_loss")
        if name in row.missing and (name in EXPECTED or row.missing[name] == EMPTY_EVALUATION)
    ]
    steps = {
        row.place: min(row.values.get("measured_steps", {}).values(), default=0) for row in measured
    }
    few = [place for place, count in steps.items() if 0 < count < FEW_STEPS]
    more = f" and {len(few) - MOST_NAMED} more" if len(few) > MOST_NAMED else ""
    short = "; ".join(few[:MOST_NAMED]) + more if len(few) < len(steps) else "all rows"
    notes = [f"{text}." for text in _by_place(missing)]
    return [*notes, f"Fewer than {FEW_STEPS} measured steps: {short}."] if few else notes


def _labels(rows: Sequence[Row]) -> list[str]:
    named = {"weights": "Sample weights", "initial_weights": "Initial weights"}
    settings = (
        (f"{title}: {setting}", row.place)
        for name, title in named.items()
        for row in rows
        if (setting := row.setting(name))
    )
    notes = by_reason(settings, len(rows))
    if any(row.synthetic for row in rows):
        notes.append("Synthetic data: speed and memory count, accuracy and loss mean nothing.")
    if any(row.weak_scaling for row in rows):
        notes.append("Weak scaling: each rank keeps its batch, so more ranks train something else.")
    ranks = [rank for row in rows for trial in row.ok_trials for rank in trial.ranks]
    threads = sorted({rank.threads for rank in ranks if rank.device == "cpu"})
    if threads:
        counts = " to ".join(map(str, dict.fromkeys((threads[0], threads[-1]))))
        mixed = ": speed-ups mix ranks and threads" if len(threads) > 1 else ""
        notes.append(f"Threads per rank: {counts}{mixed}.")
    if batch_norms_differ(rows):
        seen = "Batch norm sees one rank's share of a batch"
        notes.append(f"{seen}: quality depends on the ranks.")
    return notes


def _repeats(rows: Sequence[Row]) -> list[str]:
    """Return a note that explains ±; nothing without repeats, which the answers mention."""
    counts = sorted({len(row.ok_trials) for row in rows} - {0})
    if not counts or counts == [1]:
        return []
    number = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    trimmed = ", without the outer tenth at either end" if counts[-1] >= ROBUST_FROM else ""
    return [f"± 95 % interval of the mean of {number} repeats{trimmed}."]


def _verdicts(rows: Sequence[Row]) -> list[str]:
    count = sum(row.effect is not None for row in rows)
    if not count:
        return []
    risk = f"{100 * FAMILY_ERROR_RATE:.0f} % chance of any false verdict"
    return [f"{risk} in {counted(count, 'comparison')} (docs/method/statistics.md)."]
