"""What a reader must know beside the numbers, as short sentences, cautions first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.diagnose.stability import Instability, warnings_of
from shardmark.analysis.statistics.intervals import ROBUST_FROM
from shardmark.analysis.statistics.sampling import seeds_of
from shardmark.analysis.statistics.verdicts import FAMILY_ERROR_RATE
from shardmark.core.metrics import METRICS
from shardmark.results.schema import TrialResult

EXPECTED = ("samples_per_second", "peak_memory_bytes")
"""Metrics whose absence is worth a note; the reasons of all others are in JSON."""
FEW_STEPS = 10
"""A rate from fewer measured steps is noted."""


class NoteKind(StrEnum):
    """What a note is about, in the order of the notes."""

    EMPTY = "empty"
    FAILURE = "failure"
    DAMAGED = "damaged"
    UNFINISHED = "unfinished"
    UNSTABLE = "unstable"
    LOST = "lost"
    NOT_EQUIVALENT = "not equivalent"
    RESTARTED = "restarted"
    GAP = "gap"
    LABEL = "label"
    CHECKPOINTS = "checkpoints"
    RELATION = "relation"
    REPEATS = "repeats"
    VERDICTS = "verdicts"


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
    if warnings is None:
        warnings = warnings_of(comparison)
    parts = {
        NoteKind.EMPTY: [] if rows else ["No trial has a result."],
        NoteKind.FAILURE: _failures(rows),
        NoteKind.DAMAGED: [f"Damaged, left out: {damaged}" for damaged in comparison.damaged],
        NoteKind.UNFINISHED: _listed("Begun without a result", comparison.missing),
        NoteKind.UNSTABLE: _unstable(warnings),
        NoteKind.LOST: _lost(rows),
        NoteKind.NOT_EQUIVALENT: _not_equivalent(rows),
        NoteKind.RESTARTED: _restarted(rows),
        NoteKind.GAP: _gaps(rows),
        NoteKind.LABEL: _labels(rows),
        NoteKind.CHECKPOINTS: _checkpoints(rows),
        NoteKind.RELATION: _relations(comparison),
        NoteKind.REPEATS: [*_repeats(rows), *seeds_note(rows)],
        NoteKind.VERDICTS: _verdicts(rows),
    }
    return tuple(Note(kind, text) for kind in NoteKind for text in parts[kind])


def _relations(comparison: Comparison) -> list[str]:
    """As sentences; a strategy's name at the beginning stays as it is."""
    names = tuple(row.label for row in comparison.rows)
    return [
        f"{note if note.startswith(names) else note[:1].upper() + note[1:]}."
        for note in comparison.notes
    ]


def seeds_note(rows: Sequence[Row]) -> list[str]:
    """Where repeats share a seed: then no interval of a quality holds the luck of a seed."""
    repeated = [row for row in rows if len(row.ok_trials) > 1 and _has_quality(row)]
    if not repeated or any(seeds_of(row) > 1 for row in repeated):
        return []
    return ["All repeats share one seed: quality intervals say nothing of other seeds."]


def _has_quality(row: Row) -> bool:
    qualities = (name for name, metric in METRICS.items() if metric.group == "quality")
    return not row.synthetic and any(row.metrics.get(name) is not None for name in qualities)


def _listed(what: str, places: Iterable[str]) -> list[str]:
    text = "; ".join(places)
    return [f"{what}: {text}."] if text else []


def _together(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Places of which the same is said, joined, and what is said."""
    places: dict[str, list[str]] = {}
    for place, said in pairs:
        places.setdefault(said, []).append(place)
    return (f"{'; '.join(there)}: {said}" for said, there in places.items())


def _failures(rows: Sequence[Row]) -> list[str]:
    return list(
        _together(
            (row.place, f"{failed.count} x {failed.outcome}: {failed.reason}")
            for row in rows
            for failed in row.failed
        )
    )


def _unstable(warnings: Sequence[Instability]) -> list[str]:
    """One line a kind: the worst, how many more, and the remedy."""
    counts = Counter(warning.kind for warning in warnings)
    worst = {warning.kind: warning for warning in reversed(warnings)}
    return [
        f"UNSTABLE: {worst[kind].place}: {worst[kind].text}"
        f"{f' ({count - 1} more)' if count > 1 else ''}; {worst[kind].remedy}."
        for kind, count in counts.items()
    ]


def _lost(rows: Sequence[Row]) -> list[str]:
    """Trials that went on without a worker."""
    return [
        f"LOST: {row.place}: rank {rank.rank} {rank.lost}; the numbers are those of the others."
        for row in rows
        for trial in row.ok_trials
        for rank in trial.ranks
        if rank.lost is not None
    ]


def _not_equivalent(rows: Sequence[Row]) -> list[str]:
    different = [row for row in rows if row.equivalent is False]
    causes = ((row.place, row.deviation or "the cause is not known") for row in different)
    return [f"NOT EQUIVALENT: {text}." for text in _together(causes)]


def _restarted(rows: Sequence[Row]) -> list[str]:
    """Trials that went on from a checkpoint: how often, why, and what it took."""
    notes = []
    for row in rows:
        for trial in row.ok_trials:
            lost = trial.metrics.get("lost_seconds")
            if trial.restarts and lost is not None:
                times = f"{len(trial.restarts)} time{'' if len(trial.restarts) == 1 else 's'}"
                notes.append(
                    f"RESTARTED: {row.place}: trial {trial.id} {times}, lost {lost.value:.3g} s;"
                    f" the first time because {trial.restarts[0].reason}."
                )
    return notes


def _checkpoints(rows: Sequence[Row]) -> list[str]:
    """What checkpoints add to the training time: no rate contains them."""
    costs = [
        (cost, row.place)
        for row in rows
        for trial in row.ok_trials
        if (cost := _checkpoint_share(trial)) is not None
    ]
    if not costs:
        return []
    share, place = max(costs)
    return [f"CHECKPOINTS add up to {share:.2g} % to the time of {place}; no rate has them."]


def _checkpoint_share(trial: TrialResult) -> float | None:
    """Per cent of the measured steps' time; None where no checkpoint was written."""
    workers = [rank for rank in trial.ranks if rank.role == "worker" and rank.lost is None]
    count = max((len(rank.checkpoints) for rank in workers), default=0)
    each = trial.metrics.get("checkpoint_seconds")
    measured = max((sum(w.window_seconds for w in rank.windows) for rank in workers), default=0.0)
    return 100 * count * each.value / measured if count and each and measured else None


def _gaps(rows: Sequence[Row]) -> list[str]:
    measured = [row for row in rows if row.ok_trials]
    missing = (
        (row.place, f"no {name}: {row.missing[name]}")
        for row in measured
        for name in EXPECTED
        if name in row.missing
    )
    short = [row.place for row in measured if 0 < _measured_steps(row) < FEW_STEPS]
    return [
        *(f"{text}." for text in _together(missing)),
        *_listed(f"Fewer than {FEW_STEPS} measured steps", short),
    ]


def _measured_steps(row: Row) -> int:
    """Of the trial that has fewest; 0 where no rank recorded windows."""
    counts = [
        sum(window.end_step - window.first_step for window in rank.windows)
        for trial in row.ok_trials
        for rank in trial.ranks
        if rank.windows
    ]
    return min(counts, default=0)


def _labels(rows: Sequence[Row]) -> list[str]:
    notes = []
    if any(row.synthetic for row in rows):
        notes.append("Synthetic data: speed and memory count, accuracy and loss mean nothing.")
    if any(row.weak_scaling for row in rows):
        notes.append("Weak scaling: each rank keeps its batch, so more ranks train something else.")
    return notes


def _repeats(rows: Sequence[Row]) -> list[str]:
    """What ± is; without repeats the answers say so."""
    counts = sorted({len(row.ok_trials) for row in rows} - {0})
    if not counts or counts == [1]:
        return []
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    trimmed = ", without the outer tenth at either end" if counts[-1] >= ROBUST_FROM else ""
    return [f"± 95 % interval of the mean of {number} repeats{trimmed}."]


def _verdicts(rows: Sequence[Row]) -> list[str]:
    count = sum(row.effect is not None for row in rows)
    if not count:
        return []
    comparisons = f"{count} comparison{'' if count == 1 else 's'}"
    risk = f"{100 * FAMILY_ERROR_RATE:.0f} % chance of any false verdict"
    return [f"{comparisons} with the baseline; {risk} (docs/method/statistics.md)."]
