"""What a reader must know beside the numbers: repeats, verdicts, failures, gaps, damage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.diagnose.stability import Instability, warnings_of
from shardmark.analysis.statistics.intervals import ROBUST_FROM
from shardmark.analysis.statistics.verdicts import (
    FAMILY_ERROR_RATE,
    FASTER,
    METHOD,
    NO_DIFFERENCE,
    SLOWER,
)
from shardmark.core.metrics import METRICS, NO_CHECKPOINTS, NO_SERVERS, NO_SUCH_METRIC
from shardmark.report.table.restart_notes import checkpoints, restarted
from shardmark.report.table.seeds import seeds_note


class NoteKind(StrEnum):
    """What a note is about, in the order of the notes."""

    EMPTY = "empty"
    FAILURE = "failure"
    LOST = "lost"
    RESTARTED = "restarted"
    CHECKPOINTS = "checkpoints"
    NOT_EQUIVALENT = "not equivalent"
    EQUIVALENCE = "equivalence"
    REPEATS = "repeats"
    SEEDS = "seeds"
    VERDICTS = "verdicts"
    UNSTABLE = "unstable"
    LABEL = "label"
    RELATION = "relation"
    GAP = "gap"
    DAMAGED = "damaged"
    UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True)
class Note:
    """One sentence or two below the table."""

    kind: NoteKind
    text: str


def notes_of(
    comparison: Comparison, warnings: Sequence[Instability] | None = None
) -> tuple[Note, ...]:
    """The notes below the table, most important first; `warnings` where they are known already."""
    rows = comparison.rows
    found = warnings_of(comparison) if warnings is None else warnings
    parts: list[tuple[NoteKind, list[str]]] = [(NoteKind.EMPTY, ["No trial has a result."])]
    if rows:
        parts = [
            (NoteKind.FAILURE, _failures(rows)),
            (NoteKind.LOST, _lost(rows)),
            (NoteKind.RESTARTED, restarted(rows)),
            (NoteKind.CHECKPOINTS, checkpoints(rows)),
            (NoteKind.NOT_EQUIVALENT, _not_equivalent(rows)),
            (NoteKind.EQUIVALENCE, _equivalence(rows)),
            (NoteKind.REPEATS, _repeats(rows)),
            (NoteKind.SEEDS, seeds_note(rows)),
            (NoteKind.VERDICTS, _verdicts(rows)),
            (NoteKind.UNSTABLE, _unstable(found)),
            (NoteKind.LABEL, _labels(rows)),
            (NoteKind.RELATION, _relations(comparison)),
            (NoteKind.GAP, _gaps(rows)),
        ]
    parts.append((NoteKind.DAMAGED, _damaged(comparison)))
    parts.append((NoteKind.UNFINISHED, _unfinished(comparison)))
    return tuple(Note(kind, text) for kind, texts in parts for text in texts)


def _failures(rows: Sequence[Row]) -> list[str]:
    found = (
        (row.place, f"{failed.count} x {failed.outcome}: {failed.reason}")
        for row in rows
        for failed in row.failed
    )
    return [f"{places}: {what}" for places, what in _together(found)]


def _together(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Places of which the same is said, joined, and what is said."""
    places: dict[str, list[str]] = {}
    for place, said in pairs:
        places.setdefault(said, []).append(place)
    return [("; ".join(there), said) for said, there in places.items()]


def _lost(rows: Sequence[Row]) -> list[str]:
    """Trials that went on without a worker: their numbers are the survivors'."""
    return [
        f"LOST: {row.place}: rank {rank.rank} {rank.lost} and the others trained on; rates and "
        "quality are theirs, and lost_samples counts what it took along."
        for row in rows
        for trial in row.ok_trials
        for rank in trial.ranks
        if rank.lost is not None
    ]


def _not_equivalent(rows: Sequence[Row]) -> list[str]:
    """Which rows train something else, and why: they must not be ranked with the others."""
    return [
        f"NOT EQUIVALENT: {row.place}: {row.deviation}; do not rank it with the others."
        for row in rows
        if row.equivalent is False
    ]


def _equivalence(rows: Sequence[Row]) -> list[str]:
    """What was shown of the other rows."""
    less = [row for row in rows if row.equivalent is None and row.guarantee is not None]
    notes = [
        f"Promises less than equivalence, and keeps it: {places}: {guarantee}."
        for places, guarantee in _together((row.place, str(row.guarantee)) for row in less)
    ]
    proven = [row for row in rows if row.equivalent]
    measured = [row for row in rows if row.outcomes.get("ok") and row not in less]
    if proven and len(proven) == len(measured):
        others = " other" if less else ""
        return [*notes, f"Verified: every{others} strategy trains what the reference trains."]
    if proven or notes or any(row.equivalent is False for row in rows):
        unproven = [row.place for row in measured if row.equivalent is None]
        return [*notes, *([f"Not verified: {'; '.join(unproven)}."] if unproven else [])]
    return ["Not verified: whether the strategies train the same thing is not known here."]


def _repeats(rows: Sequence[Row]) -> list[str]:
    """What ± is, or why it is not there."""
    counts = sorted({row.outcomes.get("ok", 0) for row in rows} - {0})
    if not counts:
        return []
    if counts == [1]:
        return ["One repeat: no interval."]
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    text = f"Mean of {number} repeats, ± 95 % interval of the mean (Student's t)"
    if counts[-1] >= ROBUST_FROM:
        text += f"; from {ROBUST_FROM} repeats on without the outer tenth at either end"
    return [f"{text}; none for one repeat." if counts[0] == 1 else f"{text}."]


def _verdicts(rows: Sequence[Row]) -> list[str]:
    """How many differences are shown, by what, and how often that may be wrong."""
    compared = Counter(row.verdict for row in rows if row.effect is not None)
    if not compared:
        return []
    named = (FASTER, SLOWER, NO_DIFFERENCE)
    counts = ", ".join(f"{compared[name]} {name}" for name in named if compared[name])
    number = compared.total()
    family = (
        "one comparison, which is"
        if number == 1
        else f"{number} comparisons, one family, corrected by Holm's procedure: any of them is"
    )
    return [
        f"Verdicts on samples/s beside the baseline: {counts}. By pairs of the same repeat and"
        f" {METHOD}; {family} wrongly called faster or slower with a chance of about"
        f" {100 * FAMILY_ERROR_RATE:.0f} %. Speed-up: geometric mean of the pairs' ratios, not the"
        " ratio of the means shown; in brackets its 95 % interval, a single one and not corrected."
        " Effect sizes: --format json."
    ]


def _unstable(warnings: Sequence[Instability]) -> list[str]:
    """One line a kind: the worst, how many more, and the remedy."""
    by_kind: dict[str, list[Instability]] = {}
    for warning in warnings:
        by_kind.setdefault(warning.kind, []).append(warning)
    notes = []
    for kind, found in by_kind.items():
        worst = found[0]
        others = len(found) - 1
        more = "" if not others else f" ({others} more, less so)"
        notes.append(f"UNSTABLE, {kind}: {worst.place}: {worst.text}{more}; {worst.remedy}.")
    return notes


def _labels(rows: Sequence[Row]) -> list[str]:
    notes = []
    if any(row.synthetic for row in rows):
        notes.append("Synthetic data: speed and memory count, accuracy and loss mean nothing.")
    if any(row.weak_scaling for row in rows):
        notes.append("Weak scaling: each rank keeps its batch, so more ranks train something else.")
    return notes


def _gaps(rows: Sequence[Row]) -> list[str]:
    """Missing metrics by reason; those of rows without a trial that ended ok are told above."""
    measured = [row for row in rows if row.outcomes.get("ok")]
    by_reason: dict[str, dict[str, list[str]]] = {}
    for row in measured:
        for name, reason in row.missing.items():
            if name not in ("speedup", "memory_ratio") and reason not in (
                NO_SUCH_METRIC,
                NO_SERVERS,
                NO_CHECKPOINTS,
            ):
                by_reason.setdefault(reason, {}).setdefault(name, []).append(row.place)
    order = {name: index for index, name in enumerate(METRICS)}
    notes = []
    for reason, names in by_reason.items():
        places = set().union(*names.values())
        where = "" if len(places) == len(measured) else f" ({'; '.join(sorted(places))})"
        ordered = sorted(names, key=lambda name: (order.get(name, len(order)), name))
        notes.append(f"Not measured{where}: {', '.join(ordered)}: {reason}.")
    return notes


def _damaged(comparison: Comparison) -> list[str]:
    return [f"Damaged, left out: {damaged}" for damaged in comparison.damaged]


def _unfinished(comparison: Comparison) -> list[str]:
    missing = ", ".join(comparison.missing)
    return [f"Begun without a result: {missing}."] if missing else []


def _relations(comparison: Comparison) -> list[str]:
    """As sentences; a strategy's name at the beginning stays as it is."""
    names = tuple(row.label for row in comparison.rows)
    return [
        f"{note}." if note.startswith(names) else f"{note[:1].upper()}{note[1:]}."
        for note in comparison.notes
    ]
