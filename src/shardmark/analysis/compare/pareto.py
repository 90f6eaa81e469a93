"""Which rows nobody beats: the front of throughput against memory against quality."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from shardmark.analysis.compare.rows import Row, plain
from shardmark.analysis.statistics.edges import Edge, edges_of

RATE = "samples_per_second"
MEMORY = "peak_memory_bytes"
QUALITIES = ("accuracy_top1", "map", "validation_loss", "train_loss")
"""The one that most rows have is the front's; of several, the first."""

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
    """An eligible row with those that beat it."""

    row: Row
    dominated_by: tuple[Dominance, ...]
    """Largest gain first; none on the front."""
    perhaps_by: tuple[Dominance, ...]
    """Shown to be better in some goal; the noise could hide a larger loss in another."""

    @property
    def on_front(self) -> bool:
        return not self.dominated_by


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """The rows that do the same task in one run."""

    experiment: str
    workload: str
    goals: tuple[str, ...]
    standings: tuple[Standing, ...]
    """The front first, then by throughput."""
    left_out: tuple[tuple[Row, str], ...]
    """Rows that were measured and are not eligible, and why."""


def fronts_of(rows: Sequence[Row]) -> tuple[Front, ...]:
    """One front for each task: experiment, workload and the varied keys of the workload.

    Eligible are rows with a trial that ended ok and without a proof that they train something else.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.ok_trials:
            groups.setdefault(_task(row), []).append(row)
    return tuple(_front(group) for group in groups.values())


def _task(row: Row) -> tuple[str, ...]:
    varied = {key: value for key, value in row.varied.items() if key.startswith("workload")}
    return row.experiment, row.workload, plain(varied)


def _front(rows: Sequence[Row]) -> Front:
    sound = [row for row in rows if row.equivalent is not False]
    goals = _goals(sound)
    left_out = [(row, NOT_EQUIVALENT) for row in rows if row.equivalent is False]
    for row in sound:
        lacking = [name for name in goals if not row.values.get(name)]
        if lacking:
            left_out.append((row, f"it has no {lacking[0]}: {row.missing.get(lacking[0], '')}"))
    eligible = [row for row in sound if all(row.values.get(name) for name in goals)]
    standings = _standings(eligible, goals)
    ordered = sorted(standings, key=lambda one: (not one.on_front, -fmean(_rates(one.row))))
    return Front(
        experiment=rows[0].experiment,
        workload=rows[0].workload,
        goals=goals,
        standings=tuple(ordered),
        left_out=tuple(left_out),
    )


def _rates(row: Row) -> list[float]:
    return list(row.values.get(RATE, {}).values()) or [0.0]


def _goals(rows: Sequence[Row]) -> tuple[str, ...]:
    """Throughput and memory where any row has them, and one quality that most rows have."""
    counts = {name: sum(bool(row.values.get(name)) for row in rows) for name in QUALITIES}
    quality = max(QUALITIES, key=lambda name: counts[name])
    if any(row.synthetic for row in rows) or not counts[quality]:
        found: tuple[str, ...] = (RATE, MEMORY)
    else:
        found = (RATE, MEMORY, quality)
    return tuple(name for name in found if any(row.values.get(name) for row in rows))


def _standings(rows: Sequence[Row], goals: Sequence[str]) -> list[Standing]:
    """Rows that beat one another in a ring do not count for one another, so that some row stays.

    A ring takes pairs that were compared over different repeats, because some trials failed.
    """
    sure: dict[tuple[int, int], Dominance] = {}
    perhaps: dict[tuple[int, int], Dominance] = {}
    for (above, below), edges in edges_of(rows, goals).items():
        gains = tuple(edge for edge in edges if edge.shown)
        if gains and not any(edge.worse for edge in edges):
            found = Dominance(by=rows[above], gains=gains)
            (sure if _safe(edges, found) else perhaps)[above, below] = found
    reached = _closure(len(rows), sure)
    return [
        Standing(
            row=row,
            dominated_by=_by(sure, index, besides=reached[index]),
            perhaps_by=_by(perhaps, index),
        )
        for index, row in enumerate(rows)
    ]


def _by(
    edges: Mapping[tuple[int, int], Dominance], index: int, besides: Collection[int] = ()
) -> tuple[Dominance, ...]:
    found = [
        one for (above, below), one in edges.items() if below == index and above not in besides
    ]
    return tuple(sorted(found, key=lambda one: -one.largest.factor))


def _safe(edges: Sequence[Edge], found: Dominance) -> bool:
    """No interval allows a loss of `MARGIN`, nor one by as large a factor as that of the gain.

    Of the gain counts what is sure: the lower end of its own interval.
    """
    sure = max(gain.low or 1.0 for gain in found.gains)
    bound = max(1 / sure, 1 - MARGIN)
    others = [edge.low for edge in edges if not edge.shown]
    return all(low is not None and low > bound for low in others)


def _closure(number: int, edges: Mapping[tuple[int, int], Dominance]) -> list[set[int]]:
    """What each one beats, directly or through others."""
    direct: list[set[int]] = [set() for _ in range(number)]
    for above, below in edges:
        direct[above].add(below)
    return [_reachable(start, direct) for start in range(number)]


def _reachable(start: int, direct: Sequence[set[int]]) -> set[int]:
    found: set[int] = set()
    waiting = list(direct[start])
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting.extend(direct[one])
    return found
