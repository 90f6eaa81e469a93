"""Step time and bytes of strategies over links of several speeds, and where their order turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from pathlib import Path

from benchmarks.cluster.speed import UNLIMITED, bits_per_second

from shardmark.analysis.bandwidth import traffic_of
from shardmark.analysis.comparison import compare
from shardmark.analysis.effects import Effect, between_all, holm
from shardmark.analysis.rows import Row
from shardmark.analysis.statistics import Estimate, estimate_mean
from shardmark.analysis.verdicts import is_different
from shardmark.analysis.wire import wires_of
from shardmark.errors import InputError
from shardmark.report.page_facts import planned_trials
from shardmark.results.store import RunFolder, StoredRun, is_run, load_run

LOOPBACK = "lo"
RATE = "samples_per_second"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One strategy at one speed."""

    row: Row
    step_seconds: Mapping[int, float]
    """By repeat: time for a step of all ranks' samples, from the throughput."""
    formula_bytes: float | None
    """That the network must carry, per training rank and step."""
    interface_bytes: Estimate | None
    """Sent over all interfaces, the loopback included, per training rank and step."""
    between_nodes_bytes: float | None
    """The same without the loopback."""

    @property
    def step(self) -> Estimate:
        return estimate_mean(list(self.step_seconds.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One run: all strategies at one speed."""

    name: str
    run: StoredRun
    planned: int | None
    """Trials that the experiment asks for; None where that cannot be told."""
    cells: Mapping[str, Cell]
    """By label, the fastest strategy first."""
    differences: Mapping[tuple[str, str], Effect]
    """Of the step time, first over second, corrected for all pairs at this speed."""

    @property
    def gigabits_per_second(self) -> float:
        """Infinite without a limit."""
        found = bits_per_second(self.name)
        return inf if found is None else found / 1e9

    def faster(self, one: str, other: str) -> str | None:
        """Which of the two is shown to be faster; None where neither is."""
        for pair in ((one, other), (other, one)):
            effect = self.differences.get(pair)
            if effect is not None and is_different(effect):
                return pair[0] if effect.ratio.value < 1 else pair[1]
        return None

    @property
    def complete(self) -> bool:
        return self.planned is None or len(self.run.trials) >= self.planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A pair whose order is shown at two speeds, and is another at each."""

    first: str
    """Faster over the faster links."""
    second: str
    before: str
    """The slowest speed so far at which `first` is shown to be faster."""
    after: str
    """The next one at which `second` is."""


def read_speeds(folder: Path) -> list[Speed]:
    """Every run in the folder that has a result, the fastest links first; named by its speed.

    Raises `InputError` where there is none.
    """
    if not folder.is_dir():
        raise InputError(str(folder), "is no folder", "one with a run for each link speed")
    found = [_speed(path) for path in sorted(folder.iterdir()) if is_run(path)]
    speeds = [one for one in found if one.cells]
    if not speeds:
        raise InputError(
            str(folder), "holds no run with a result", "`experiment --out` writes such a folder"
        )
    return sorted(speeds, key=lambda one: -one.gigabits_per_second)


def labels_of(speeds: Sequence[Speed]) -> list[str]:
    """In the order of the fastest links."""
    return list(dict.fromkeys(label for speed in speeds for label in speed.cells))


def turns_of(speeds: Sequence[Speed]) -> list[Turn]:
    """All of them, from the fastest links on; speeds at which nothing is shown are passed over."""
    found = []
    for one, other in combinations(labels_of(speeds), 2):
        leader: str | None = None
        last = ""
        for speed in speeds:
            now = speed.faster(one, other)
            if now is None:
                continue
            if leader is not None and now != leader:
                found.append(Turn(first=leader, second=now, before=last, after=speed.name))
            leader, last = now, speed.name
    return found


def crossings_of(speeds: Sequence[Speed]) -> set[frozenset[str]]:
    """Pairs whose means have not the same order at every speed, shown or not."""
    found = set()
    for one, other in combinations(labels_of(speeds), 2):
        both = [speed.cells for speed in speeds if one in speed.cells and other in speed.cells]
        if len({cells[one].step.value < cells[other].step.value for cells in both}) > 1:
            found.add(frozenset((one, other)))
    return found


def _speed(path: Path) -> Speed:
    name = path.name.replace("-", "/")
    bits_per_second(name)  # its own message where the folder is not named by a speed
    run = load_run(path)
    rows = [row for row in compare([run], None).rows if row.ok_trials and row.values.get(RATE)]
    cells = {row.label: _cell(row) for row in rows}
    labels = sorted(cells, key=lambda label: cells[label].step.value)
    pairs = between_all([cells[label].step_seconds for label in labels])
    corrected = holm(list(pairs.values()))
    return Speed(
        name=UNLIMITED if name.lower() == UNLIMITED else name,
        run=run,
        planned=planned_trials(run),
        cells={label: cells[label] for label in labels},
        differences={
            (labels[one], labels[other]): effect
            for (one, other), effect in zip(pairs, corrected, strict=True)
        },
    )


def _cell(row: Row) -> Cell:
    batch = _batch(row)
    (wire,) = wires_of([row])
    between = [
        one.sent.step_bytes.value
        for one in traffic_of(row).interfaces
        if one.name != LOOPBACK and one.sent.step_bytes is not None
    ]
    return Cell(
        row=row,
        step_seconds={repeat: batch / rate for repeat, rate in row.values[RATE].items()},
        formula_bytes=wire.defined_bytes,
        interface_bytes=wire.interface_bytes,
        between_nodes_bytes=sum(between) / row.world_size if between else None,
    )


def _batch(row: Row) -> int:
    """Samples per step over all ranks."""
    recipe = row.ok_trials[0].trial["recipe"]
    per_rank = recipe.get("per_rank_batch")
    return int(recipe["global_batch"] if per_rank is None else per_rank * row.world_size)


def environments(speeds: Sequence[Speed]) -> list[dict[str, object]]:
    """Machine and versions of each run."""
    return [RunFolder(speed.run.path).read_environment() for speed in speeds]
