"""Which rows nobody beats: the front of throughput against memory against quality."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shardmark.analysis.compare.rows import Row, main_quality, rate_of, task_of
from shardmark.analysis.statistics.edges import Edge, edges_of

GOALS = ("samples_per_second", "peak_memory_bytes")
"""Beside the main quality."""
NOT_EQUIVALENT = "trains something else"
MARGIN = 0.05
"""A loss of this size and more must be ruled out in every other goal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dominance:
    """A row that beats another one."""

    by: Row
    gains: tuple[Edge, ...]
    """Goals in which it is shown to be better."""

    @property
    def largest(self) -> Edge:
        return max(self.gains, key=lambda gain: gain.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A row with those that beat it."""

    row: Row
    dominated_by: tuple[Dominance, ...] = ()
    """Largest gain first; none on the front."""
    perhaps_by: tuple[Dominance, ...] = ()
    """Shown to be better in some goal; the noise could hide a larger loss in another."""
    reason: str | None = None
    """Why it is not eligible."""

    @property
    def on_front(self) -> bool:
        return self.reason is None and not self.dominated_by


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """The rows that do the same task in one run."""

    task: tuple[str, ...]
    experiment: str
    workload: str
    goals: tuple[str, ...]
    standings: tuple[Standing, ...]
    """The front first, then by throughput; what is not eligible last."""


def fronts_of(rows: Sequence[Row]) -> tuple[Front, ...]:
    """One front for each task: experiment, workload and the varied keys of the workload.

    Eligible are rows with a trial that ended ok and without a proof that they train something else.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.ok_trials:
            groups.setdefault(task_of(row), []).append(row)
    return tuple(_front(task, group) for task, group in groups.items())


def _front(task: tuple[str, ...], rows: Sequence[Row]) -> Front:
    equivalent = [row for row in rows if row.equivalent is not False]
    goals = _goals(equivalent)
    reasons = [_not_eligible(row, goals) for row in rows]
    eligible = [row for row, reason in zip(rows, reasons, strict=True) if reason is None]
    standings = [
        *_standings(eligible, goals),
        *(Standing(row=r, reason=why) for r, why in zip(rows, reasons, strict=True) if why),
    ]
    standings.sort(key=lambda s: (s.reason is not None, not s.on_front, -rate_of(s.row)))
    return Front(
        task=task,
        experiment=rows[0].experiment,
        workload=rows[0].workload,
        goals=goals,
        standings=tuple(standings),
    )


def _goals(rows: Sequence[Row]) -> tuple[str, ...]:
    """Throughput and memory where any row has them, and one quality that most rows have."""
    quality = main_quality(rows)
    names = GOALS if quality is None else (*GOALS, quality)
    return tuple(name for name in names if any(row.values.get(name) for row in rows))


def _not_eligible(row: Row, goals: Sequence[str]) -> str | None:
    if row.equivalent is False:
        return NOT_EQUIVALENT
    lacking = [name for name in goals if not row.values.get(name)]
    return f"it has no {lacking[0]}: {row.missing.get(lacking[0], '')}" if lacking else None


def _standings(rows: Sequence[Row], goals: Sequence[str]) -> list[Standing]:
    """Rows that beat one another in a ring do not count for one another, so that some row stays.

    A ring takes pairs that were compared over different repeats, because some trials failed.
    """
    sure: dict[tuple[int, int], Dominance] = {}
    perhaps: dict[tuple[int, int], Dominance] = {}
    for (above, below), edges in edges_of(rows, goals).items():
        gains = tuple(edge for edge in edges if edge.shown)
        if gains and not any(edge.worse for edge in edges):
            dominance = Dominance(by=rows[above], gains=gains)
            (sure if _safe(edges, gains) else perhaps)[above, below] = dominance
    return [
        Standing(
            row=row,
            dominated_by=_by(sure, index, besides=_beaten_by(index, sure)),
            perhaps_by=_by(perhaps, index),
        )
        for index, row in enumerate(rows)
    ]


def _by(
    dominances: Mapping[tuple[int, int], Dominance], index: int, besides: Collection[int] = ()
) -> tuple[Dominance, ...]:
    chosen = [
        dominance
        for (above, below), dominance in dominances.items()
        if below == index and above not in besides
    ]
    return tuple(sorted(chosen, key=lambda dominance: -dominance.largest.factor))


def _safe(edges: Sequence[Edge], gains: Sequence[Edge]) -> bool:
    """No interval allows a loss of `MARGIN`, nor one by as large a factor as that of the gain.

    Of the gain counts what is sure: the lower end of its own interval.
    """
    sure = max(gain.low or 1.0 for gain in gains)
    bound = max(1 / sure, 1 - MARGIN)
    others = [edge.low for edge in edges if not edge.shown]
    return all(low is not None and low > bound for low in others)


def _beaten_by(start: int, dominances: Mapping[tuple[int, int], Dominance]) -> set[int]:
    """What the row beats, directly or through others."""
    reached: set[int] = set()
    waiting = [start]
    while waiting:
        beaten = {below for above, below in dominances if above == waiting[-1]} - reached
        waiting.pop()
        reached |= beaten
        waiting.extend(beaten)
    return reached
