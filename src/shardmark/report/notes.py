"""What a reader must know beside the numbers: repeats, verdicts, failures, gaps, damage."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.analysis.comparison import Comparison
from shardmark.analysis.rows import Row
from shardmark.measure.metrics import METRICS, NO_SERVERS, NO_SUCH_METRIC


def notes_of(comparison: Comparison) -> tuple[str, ...]:
    """The notes below the table, most important first."""
    rows = comparison.rows
    if not rows:
        return ("No trial has a result.", *_stored(comparison))
    return (
        *_failures(rows),
        *_lost(rows),
        *_equivalence(rows),
        *_repeats(rows),
        *_verdicts(rows),
        *_labels(rows),
        *(_sentence(note) for note in comparison.notes),
        *_gaps(rows),
        *_stored(comparison),
    )


def _failures(rows: Sequence[Row]) -> list[str]:
    return [
        f"{row.place}: {failed.count} x {failed.outcome}: {failed.reason}"
        for row in rows
        for failed in row.failed
    ]


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


def _equivalence(rows: Sequence[Row]) -> list[str]:
    """Which rows train something else, and why: they must not be ranked with the others."""
    notes = [
        f"NOT EQUIVALENT: {row.place}: {row.deviation}; do not rank it with the others."
        for row in rows
        if row.equivalent is False
    ]
    less = [row for row in rows if row.equivalent is None and row.promise is not None]
    notes += [
        f"Promises less than equivalence, and keeps it: {row.place}: {row.promise}." for row in less
    ]
    proven = [row for row in rows if row.equivalent]
    measured = [row for row in rows if row.outcomes.get("ok") and row not in less]
    if proven and len(proven) == len(measured):
        others = " other" if less else ""
        return [*notes, f"Verified: every{others} strategy trains what the reference trains."]
    if proven or notes:
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
    return [f"{text}; none for one repeat." if counts[0] == 1 else f"{text}."]


def _verdicts(rows: Sequence[Row]) -> list[str]:
    """Differences inside the noise are called so."""
    unsure = [row.place for row in rows if row.verdict == "within noise"]
    if not unsure:
        return []
    return [f"Within the noise, neither faster nor slower than the baseline: {'; '.join(unsure)}."]


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


def _stored(comparison: Comparison) -> list[str]:
    notes = [f"Damaged, left out: {damaged}" for damaged in comparison.damaged]
    if comparison.missing:
        notes.append(f"Begun without a result: {', '.join(comparison.missing)}.")
    return notes


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
