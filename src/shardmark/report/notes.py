"""What a reader must know beside the numbers: repeats, verdicts, failures, gaps, damage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardmark.analysis.comparison import Comparison
from shardmark.analysis.rows import Row
from shardmark.analysis.stability import Instability, warnings_of
from shardmark.analysis.statistics import ROBUST_FROM
from shardmark.analysis.verdicts import FAMILY_ERROR_RATE, FASTER, NO_DIFFERENCE, SLOWER
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
        *_unstable(comparison),
        *_labels(rows),
        *(_sentence(note) for note in comparison.notes),
        *_gaps(rows),
        *_stored(comparison),
    )


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


def _equivalence(rows: Sequence[Row]) -> list[str]:
    """Which rows train something else, and why: they must not be ranked with the others."""
    notes = [
        f"NOT EQUIVALENT: {row.place}: {row.deviation}; do not rank it with the others."
        for row in rows
        if row.equivalent is False
    ]
    less = [row for row in rows if row.equivalent is None and row.promise is not None]
    notes += [
        f"Promises less than equivalence, and keeps it: {places}: {promise}."
        for places, promise in _together((row.place, str(row.promise)) for row in less)
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
    if counts[-1] >= ROBUST_FROM:
        text += f"; from {ROBUST_FROM} repeats on without the outer tenth at either end"
    return [f"{text}; none for one repeat." if counts[0] == 1 else f"{text}."]


def _verdicts(rows: Sequence[Row]) -> list[str]:
    """Which differences are shown, and how often that may be wrong."""
    compared = [row for row in rows if row.effect is not None]
    if not compared:
        return []
    notes = []
    for verdict, text in (
        (FASTER, "Faster than the baseline"),
        (SLOWER, "Slower than the baseline"),
        (NO_DIFFERENCE, "No difference shown from the baseline"),
    ):
        those = [_with_effect(row) for row in compared if row.verdict == verdict]
        if those:
            notes.append(f"{text}: {'; '.join(those)}.")
    count = len(compared)
    family = (
        "one comparison; it is wrongly called faster or slower with a chance of"
        if count == 1
        else f"a family of {count} comparisons, corrected by Holm's procedure; any of them is"
        " wrongly called faster or slower with a chance of"
    )
    return [
        *notes,
        f"Verdicts: samples/s of the same repeats, t test of the log ratios, {family} at most"
        f" {100 * FAMILY_ERROR_RATE:.0f} %. Intervals are single ones, not corrected.",
    ]


def _with_effect(row: Row) -> str:
    """With the effect in percent, and in standard deviations of the pairs' log ratios (d)."""
    assert row.effect is not None, "the caller looked"
    found = f"{row.effect.percent:+.1f} %"
    if row.effect.standardised is not None:
        found += f", d = {row.effect.standardised:.1f}"
    return f"{row.place} ({found})"


def _unstable(comparison: Comparison) -> list[str]:
    """One line a kind: the worst, how many more, and the remedy."""
    by_kind: dict[str, list[Instability]] = {}
    for warning in warnings_of(comparison):
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
