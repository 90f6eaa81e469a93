"""Step time and bytes of strategies over links of several speeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from benchmarks.cluster.speed import UNLIMITED, bits_per_second

from shardmark.analysis.compare.comparison import Comparison, compare
from shardmark.analysis.compare.rows import EXECUTION_KEYS, OWN_COLUMNS, Row, plain
from shardmark.analysis.compare.verdicts import is_different
from shardmark.analysis.diagnose.stability import Instability, warnings_of
from shardmark.analysis.network.traffic import traffic_of
from shardmark.analysis.network.wire import WireOfRow, wires_of
from shardmark.analysis.statistics.effects import Effect, between_all, holm
from shardmark.analysis.statistics.intervals import Estimate, estimate_mean
from shardmark.config.axes import NODES
from shardmark.core.errors import InputError
from shardmark.report.page.parts import planned_trials
from shardmark.results.store import StoredRun, is_run, load_run

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
    peak_bytes_per_second: float | None
    """The most between two samplings over one interface but the loopback, in one direction."""

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
    """By name, the fastest strategy first."""
    differences: Mapping[tuple[str, str], Effect]
    """Of the step time, first over second, for pairs that train the same thing on as many ranks;
    corrected for all of them at this speed."""
    warnings: tuple[Instability, ...] = ()
    """What was not calm while it ran, the worst of each kind first."""

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
    def comparable(self) -> list[str]:
        """Names of the most that train the same thing on as many ranks, the fastest first."""
        groups: dict[object, list[str]] = {}
        for name, cell in self.cells.items():
            groups.setdefault(group_of(cell.row), []).append(name)
        return max(groups.values(), key=len)

    @property
    def peak_bytes_per_second(self) -> float | None:
        """The most that a link was seen to carry; None where no strategy tells."""
        known = (cell.peak_bytes_per_second for cell in self.cells.values())
        return max((one for one in known if one is not None), default=None)

    def places(self) -> dict[str, int]:
        """From 1 for the fastest, among those that train the same thing on as many ranks."""
        seen: Counter[object] = Counter()
        found = {}
        for name, cell in self.cells.items():
            group = group_of(cell.row)
            seen[group] += 1
            found[name] = seen[group]
        return found

    @property
    def complete(self) -> bool:
        return self.planned is None or len(self.run.trials) >= self.planned


def read_speeds(folder: Path) -> list[Speed]:
    """Every run in the folder that has a result, the fastest links first; named by its speed.

    Raises `InputError` where there is none, or a folder beside them is named by no speed.
    """
    if not folder.is_dir():
        raise InputError(str(folder), "is no folder", "one with a run for each link speed")
    names = {path: _name(path) for path in sorted(folder.iterdir()) if _is_shown(path)}
    runs = {path: load_run(path) for path in names if is_run(path)}
    compared = {path: compare([run], None) for path, run in runs.items()}
    all_rows = [row for found in compared.values() for row in found.rows]
    speeds = [
        _speed(names[path], run, compared[path], all_rows)
        for path, run in runs.items()
        if _measured(compared[path])
    ]
    if not speeds:
        raise InputError(
            str(folder), "holds no run with a result", "`experiment --out` writes such a folder"
        )
    return sorted(speeds, key=lambda one: -one.gigabits_per_second)


def labels_of(speeds: Sequence[Speed]) -> list[str]:
    """Names of the rows in the order of the fastest links."""
    return list(dict.fromkeys(label for speed in speeds for label in speed.cells))


def group_of(row: Row) -> tuple[object, ...]:
    """What two rows share whose step times may be held against one another."""
    varied = sorted((key, plain(one)) for key, one in row.varied.items())
    trained = tuple((key, one) for key, one in varied if key not in EXECUTION_KEYS)
    return (row.workload, row.precision, row.world_size, trained)


def name_of(row: Row, among: Sequence[Row]) -> str:
    """The row's label, with ranks, nodes and other keys where these differ among its rows."""
    parts, among = [row.label], [one for one in among if one.label == row.label]
    if len({one.world_size for one in among}) > 1:
        parts.append(f"{row.world_size} ranks")
    if len({one.nodes for one in among}) > 1:
        parts.append(f"{row.nodes} node{'s' if row.nodes > 1 else ''}")
    if len({one.precision for one in among}) > 1:
        parts.append(row.precision)
    parts += (
        f"{key.rpartition('.')[2]} {plain(value)}"
        for key, value in row.varied.items()
        if key not in OWN_COLUMNS and key != NODES
    )
    return ", ".join(parts)


def _is_shown(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")


def _name(path: Path) -> str:
    name = path.name.replace("-", "/")
    try:
        bits_per_second(name)
    except InputError:
        raise InputError(
            str(path),
            "is a folder that is not named by a link speed",
            "beside the runs only such as unlimited, 10gbit, 200mbit",
        ) from None
    return UNLIMITED if name.lower() == UNLIMITED else name


def _measured(comparison: Comparison) -> list[Row]:
    return [row for row in comparison.rows if row.ok_trials and row.values.get(RATE)]


def _speed(name: str, run: StoredRun, comparison: Comparison, among: Sequence[Row]) -> Speed:
    """Raises `InputError` for two rows of one name."""
    rows = _measured(comparison)
    count = Counter(name_of(row, among) for row in rows)
    twice = [one for one, times in count.items() if times > 1]
    if twice:
        raise InputError(str(run.path), f"has several rows {twice[0]!r}", "one row of each name")
    cells = {name_of(one.row, among): _cell(one) for one in wires_of(rows)}
    labels = sorted(cells, key=lambda label: cells[label].step.value)
    effects: dict[tuple[str, str], Effect] = {}
    for group in dict.fromkeys(group_of(cells[label].row) for label in labels):
        own = [label for label in labels if group_of(cells[label].row) == group]
        pairs = between_all([cells[label].step_seconds for label in own])
        effects |= {(own[one], own[other]): effect for (one, other), effect in pairs.items()}
    return Speed(
        name=name,
        run=run,
        planned=planned_trials(run),
        cells={label: cells[label] for label in labels},
        differences=dict(zip(effects, holm(list(effects.values())), strict=True)),
        warnings=warnings_of(comparison),
    )


def _cell(wire: WireOfRow) -> Cell:
    row = wire.row
    batch = batch_of(row)
    links = [one for one in traffic_of(row).interfaces if one.name != LOOPBACK]
    between = [one.sent.step_bytes.value for one in links if one.sent.step_bytes is not None]
    peaks = [way.peak_bytes_per_second for one in links for way in (one.sent, one.received)]
    return Cell(
        row=row,
        step_seconds={repeat: batch / rate for repeat, rate in row.values[RATE].items()},
        formula_bytes=wire.defined_bytes,
        interface_bytes=wire.interface_bytes,
        between_nodes_bytes=sum(between) / row.world_size if between else None,
        peak_bytes_per_second=max((one for one in peaks if one is not None), default=None),
    )


def batch_of(row: Row) -> int:
    """Samples per step over all ranks."""
    recipe = row.ok_trials[0].trial["recipe"]
    per_rank = recipe.get("per_rank_batch")
    return int(recipe["global_batch"] if per_rank is None else per_rank * row.world_size)
