"""Step time and bytes of strategies over links of several speeds, as tables and numbers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf, isinf
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cluster.bench import UNLIMITED, bits_per_second
from benchmarks.harness import Table, surroundings_in, surroundings_line

from shardmark.base.cells import NODES
from shardmark.base.errors import InputError
from shardmark.base.files.strict_yaml import format_yaml
from shardmark.base.results.schema import StabilityKind
from shardmark.base.results.store import RunFolder, StoredRun, is_run, load_run
from shardmark.base.statistics.effects import Effect, holm, pairwise_effects
from shardmark.base.statistics.intervals import Estimate, estimate_mean
from shardmark.bench.analysis.compare.comparison import Comparison, compare
from shardmark.bench.analysis.compare.rows import EXECUTION_KEYS, FIXED_COLUMNS, Row, plain
from shardmark.bench.analysis.compare.verdicts import is_different
from shardmark.bench.analysis.diagnose.stability import Instability, warnings_of
from shardmark.bench.analysis.network.traffic import traffic_of
from shardmark.bench.analysis.network.wire import WireOfRow, wires_of
from shardmark.bench.report.page.parts import planned_trials

NAME = "link-speeds"
LOOPBACK = "lo"
RATE = "samples_per_second"
MEGABYTE = 1e6
STEPS_NOTE = (
    "Seconds for a step of all ranks' samples, from the throughput of the measured windows, with"
    " the 95 % interval over the repeats; in brackets the place at that speed, by the mean, among"
    " strategies on as many ranks."
)
BYTES_NOTE = (
    "MB (10^6 bytes) sent for each training rank and step, mean over the repeats: between nodes /"
    " over all interfaces, the loopback included. formula: what the definition of the strategy"
    " needs inside nodes and between them; the second number compares with it."
)
WINNERS_NOTE = "The fastest by the mean, and all that are not shown to be slower."
CALM_NOTE = "Warnings of the stability analysis of `compare`: trials affected, and the worst one."
REVERSALS_NOTE = (
    "Pairs that include the fastest strategy at one of the speeds. The order of a named pair is"
    " shown at both speeds, by the test behind the verdicts of `compare`, corrected for all pairs"
    " at a speed, and differs."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One strategy at one speed."""

    row: Row
    step_seconds: Mapping[int, float]
    """Time of a step of all ranks' samples, by repeat, from the throughput."""
    formula_bytes: float | None
    """Bytes that the network must carry, per training rank and step."""
    interface_bytes: Estimate | None
    """Bytes sent over all interfaces, the loopback included, per training rank and step."""
    between_nodes_bytes: float | None
    """The same bytes without the loopback."""

    @property
    def step(self) -> Estimate:
        return estimate_mean(list(self.step_seconds.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One run: all strategies at one link speed."""

    name: str
    run: StoredRun
    planned: int | None
    """Trials that the experiment asks for; None if its file cannot be read."""
    cells: Mapping[str, Cell]
    """Cells by name, the fastest strategy first."""
    differences: Mapping[tuple[str, str], Effect]
    """Ratio of the step times of two names that train the same thing on as many ranks."""
    warnings: tuple[Instability, ...] = ()

    @property
    def gigabits_per_second(self) -> float:
        """Speed of a link; infinite without a limit."""
        speed = bits_per_second(self.name)
        return inf if speed is None else speed / 1e9

    def faster(self, one: str, other: str) -> str | None:
        """The name that is shown to be faster; None if no difference is shown."""
        for pair in ((one, other), (other, one)):
            effect = self.differences.get(pair)
            if effect is not None and is_different(effect):
                return pair[0] if effect.ratio.value < 1 else pair[1]
        return None

    @property
    def comparable(self) -> list[str]:
        """The largest set of names that train the same thing on as many ranks, fastest first."""
        groups: dict[object, list[str]] = {}
        for name, cell in self.cells.items():
            groups.setdefault(group_of(cell.row), []).append(name)
        return max(groups.values(), key=len)

    def places(self) -> dict[str, int]:
        """Ranking from 1 by name, among names that train the same thing on as many ranks."""
        seen: Counter[object] = Counter()
        places = {}
        for name, cell in self.cells.items():
            seen[group_of(cell.row)] += 1
            places[name] = seen[group_of(cell.row)]
        return places

    @property
    def complete(self) -> bool:
        return self.planned is None or len(self.run.trials) >= self.planned


class Reversal(NamedTuple):
    """A pair of which `first` is shown to be faster at `before`, and `second` at `after`."""

    first: str
    second: str
    before: str
    after: str


def read_speeds(folder: Path) -> list[Speed]:
    """Read every run in the folder that has a result, the fastest links first.

    Raises `InputError` if there is none, or if a folder is not named by a link speed.
    """
    if not folder.is_dir():
        raise InputError(str(folder), "is no folder", "one with a run for each link speed")
    folders = [path for path in sorted(folder.iterdir()) if path.is_dir() and path.name[0] != "."]
    names = {path: _speed_name(path) for path in folders}
    runs = {path: load_run(path) for path in folders if is_run(path)}
    compared = {path: compare([run], None) for path, run in runs.items()}
    all_rows = [row for comparison in compared.values() for row in comparison.rows]
    speeds = [
        _speed(names[path], run, compared[path], all_rows)
        for path, run in runs.items()
        if _measured(compared[path])
    ]
    if not speeds:
        raise InputError(
            str(folder), "holds no run with a result", "`experiment --out` writes such a folder"
        )
    return sorted(speeds, key=lambda speed: -speed.gigabits_per_second)


def labels_of(speeds: Sequence[Speed]) -> list[str]:
    """Names of the rows in the order of the fastest links."""
    return list(dict.fromkeys(label for speed in speeds for label in speed.cells))


def group_of(row: Row) -> tuple[object, ...]:
    """A key that is equal for two rows whose step times may be compared."""
    varied = sorted((key, plain(value)) for key, value in row.varied.items())
    trained = tuple((key, value) for key, value in varied if key not in EXECUTION_KEYS)
    return (row.workload, row.precision, row.world_size, trained)


def name_of(row: Row, among: Sequence[Row]) -> str:
    """The row's label, with ranks, nodes and other keys that differ among rows of that label."""
    parts, rows = [row.label], [other for other in among if other.label == row.label]
    if len({other.world_size for other in rows}) > 1:
        parts.append(f"{row.world_size} ranks")
    if len({other.nodes for other in rows}) > 1:
        parts.append(f"{row.nodes} node{'s' if row.nodes > 1 else ''}")
    if len({other.precision for other in rows}) > 1:
        parts.append(row.precision)
    parts += (
        f"{key.rpartition('.')[2]} {plain(value)}"
        for key, value in row.varied.items()
        if key not in FIXED_COLUMNS and key != NODES
    )
    return ", ".join(parts)


def _speed_name(path: Path) -> str:
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
    counts = Counter(name_of(row, among) for row in rows)
    twice = [label for label, count in counts.items() if count > 1]
    if twice:
        raise InputError(str(run.path), f"has several rows {twice[0]!r}", "one row of each name")
    cells = {name_of(wire.row, among): _cell(wire) for wire in wires_of(rows)}
    labels = sorted(cells, key=lambda label: cells[label].step.value)
    effects: dict[tuple[str, str], Effect] = {}
    for group in dict.fromkeys(group_of(cells[label].row) for label in labels):
        members = [label for label in labels if group_of(cells[label].row) == group]
        pairs = pairwise_effects([cells[label].step_seconds for label in members])
        effects |= {(members[one], members[other]): of for (one, other), of in pairs.items()}
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
    recipe = row.ok_trials[0].trial["recipe"]
    per_rank = recipe.get("per_rank_batch")
    batch = int(recipe["global_batch"] if per_rank is None else per_rank * row.world_size)
    links = [link for link in traffic_of(row).interfaces if link.name != LOOPBACK]
    between = [link.sent.step_bytes.value for link in links if link.sent.step_bytes is not None]
    return Cell(
        row=row,
        step_seconds={repeat: batch / rate for repeat, rate in row.values[RATE].items()},
        formula_bytes=wire.defined_bytes,
        interface_bytes=wire.interface_bytes,
        between_nodes_bytes=sum(between) / row.world_size if between else None,
    )


def reversals_of(speeds: Sequence[Speed]) -> list[Reversal]:
    """All reversals, from the fastest links on; speeds that show nothing of a pair are skipped."""
    reversals = []
    for one, other in combinations(labels_of(speeds), 2):
        leader: str | None = None
        last = ""
        for speed in speeds:
            faster = speed.faster(one, other)
            if faster is None:
                continue
            if leader is not None and faster != leader:
                reversals.append(Reversal(leader, faster, last, speed.name))
            leader, last = faster, speed.name
    return reversals


def write_table(speeds: Sequence[Speed], out: Path, command: str) -> list[Path]:
    """Write `DATE-link-speeds.json` and `.md`; return their paths."""
    records = [RunFolder(speed.run.path).read_environment() for speed in speeds]
    around = surroundings_in(records[0])
    reversals = reversals_of(speeds)
    content = {
        "benchmark": NAME,
        **around,
        "commits": [(record.get("git") or {}).get("commit") for record in records],
        "load_before": [record.get("load") for record in records],
        "command": command,
        "speeds": [_speed_json(speed) for speed in speeds],
        "turns": [reversal._asdict() for reversal in reversals],
    }
    stem = f"{around['date'][:10]}-{NAME}"
    out.mkdir(parents=True, exist_ok=True)
    data, text = out / f"{stem}.json", out / f"{stem}.md"
    data.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    ending = f"{surroundings_line(around)}\n\n`{command}`\n"
    text.write_text(f"{markdown(speeds, reversals)}\n\n{ending}")
    return [data, text]


def markdown(speeds: Sequence[Speed], reversals: Sequence[Reversal]) -> str:
    """The experiment, step times, disturbances, reversals and bytes."""
    partial = [s for s in speeds if not s.complete]
    counts = ", ".join(f"{s.name} ({len(s.run.trials)} of {s.planned})" for s in partial)
    experiment = format_yaml(RunFolder(speeds[0].run.path).read_experiment()).strip()
    parts = [
        f"# Strategies over links of {len(speeds)} speeds",
        *[f"**Not complete, trials: {counts}.**"] * bool(partial),
        "Nodes are network namespaces that share the cores of one machine; a token bucket limits"
        " each link in both directions.",
        f"```yaml\n{experiment}\n```",
        "## Step time",
        steps_table(speeds).markdown(),
        calm_table(speeds).markdown(),
        "## Fastest strategies",
        winners_table(speeds).markdown(),
        "## Where the order changes",
        "\n".join(reversal_lines(speeds, reversals)),
        REVERSALS_NOTE,
        "## Bytes",
        bytes_table(speeds).markdown(),
    ]
    return "\n\n".join(parts)


def steps_table(speeds: Sequence[Speed]) -> Table:
    """A line for each strategy, a column for each speed."""
    places = {speed.name: speed.places() for speed in speeds}

    def text(speed: Speed, label: str) -> str:
        cell = speed.cells.get(label)
        return "-" if cell is None else f"{_interval(cell.step)} ({places[speed.name][label]})"

    return Table(
        columns=("strategy", *(f"{speed.name}, s" for speed in speeds)),
        rows=tuple(
            (label, *(text(speed, label) for speed in speeds)) for label in labels_of(speeds)
        ),
        notes=(STEPS_NOTE,),
    )


def calm_table(speeds: Sequence[Speed]) -> Table:
    """A line for each speed and kind of disturbance, with the trials and the verification."""
    rows = []
    for speed in speeds:
        measured = [cell.row for cell in speed.cells.values()]
        ok = sum(len(row.ok_trials) for row in measured)
        equivalent = sum(row.equivalent is True for row in measured)
        start = (speed.name, f"{ok} of {speed.planned or ok}", f"{equivalent} of {len(measured)}")
        disturbances = _disturbances(speed)
        rows += [(*start, d["kind"], d["trials"], d["worst"]) for d in disturbances]
        rows += [(*start, "none", "-", "-")] * (not disturbances)
    columns = ("links", "trials ok", "verified", "disturbance", "trials", "worst")
    return Table(columns=columns, rows=tuple(rows), notes=(CALM_NOTE,))


def _disturbances(speed: Speed) -> list[dict[str, str]]:
    ids = {trial.id for trial in speed.run.trials}
    lines = []
    for kind in StabilityKind:
        warnings = [warning for warning in speed.warnings if warning.kind is kind]
        trials = {warning.place for warning in warnings} & ids
        if warnings:
            count = str(len(trials)) if trials else "-"
            lines.append({"kind": str(kind), "trials": count, "worst": warnings[0].text})
    return lines


def winners_table(speeds: Sequence[Speed]) -> Table:
    """A line for each speed: the fastest strategy, and those not shown to be slower."""
    rows = []
    for speed in speeds:
        winner, *others = speed.comparable
        as_fast = [name for name in others if speed.faster(winner, name) is None]
        best = f"{winner}, {_interval(speed.cells[winner].step)} s"
        rows.append((speed.name, best, ", ".join(as_fast) or "none"))
    columns = ("links", "fastest", "not shown to be slower")
    return Table(columns=columns, rows=tuple(rows), notes=(WINNERS_NOTE,))


def bytes_table(speeds: Sequence[Speed]) -> Table:
    rows = []
    for label in labels_of(speeds):
        cells = [speed.cells.get(label) for speed in speeds]
        formula = next((cell.formula_bytes for cell in cells if cell and cell.formula_bytes), None)
        rows.append((label, _megabytes(formula), *map(_bytes, cells)))
    columns = ("strategy", "formula, MB", *(f"{speed.name}, MB" for speed in speeds))
    return Table(columns=columns, rows=tuple(rows), notes=(BYTES_NOTE,))


def reversal_lines(speeds: Sequence[Speed], reversals: Sequence[Reversal]) -> list[str]:
    """A Markdown list of the pairs that include the fastest strategy at some speed."""
    if not reversals:
        return ["No pair of strategies is shown to change its order."]
    by_name = {speed.name: speed for speed in speeds}
    winners = {speed.comparable[0] for speed in speeds}
    named = [reversal for reversal in reversals if winners & {reversal.first, reversal.second}]
    lines = []
    for pair in named:
        sides = [(pair.before, pair.first, pair.second), (pair.after, pair.second, pair.first)]
        texts = [
            f"at {name} {fast} is faster by {_percent(by_name[name], fast, slow)}"
            for name, fast, slow in sides
        ]
        lines.append(f"- {pair.first} and {pair.second}: {', '.join(texts)}.")
    return [*lines, "", f"Further pairs: {len(reversals) - len(named)}."]


def _percent(speed: Speed, fast: str, slow: str) -> str:
    effect = speed.differences.get((fast, slow)) or speed.differences[slow, fast]
    ratio = effect.ratio.value
    return f"{100 * (max(ratio, 1 / ratio) - 1):.0f} %"


def _interval(estimate: Estimate) -> str:
    text = f"{estimate.value:.3f}"
    return text if estimate.half_width is None else f"{text} ±{estimate.half_width:.3f}"


def _bytes(cell: Cell | None) -> str:
    if cell is None or cell.interface_bytes is None:
        return "-"
    return f"{_megabytes(cell.between_nodes_bytes)} / {_megabytes(cell.interface_bytes.value)}"


def _megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / MEGABYTE:.1f}"


def _speed_json(speed: Speed) -> dict[str, Any]:
    limit = speed.gigabits_per_second
    return {
        "speed": speed.name,
        "gigabits_per_second": None if isinf(limit) else limit,
        "trials": len(speed.run.trials),
        "planned": speed.planned,
        "not_calm": _disturbances(speed),
        "strategies": {label: _cell_json(cell) for label, cell in speed.cells.items()},
        "differences": [
            {
                "first": one,
                "second": other,
                "step_time_ratio": effect.ratio.value,
                "low": effect.ratio.low,
                "high": effect.ratio.high,
                "p_corrected": effect.p_corrected,
                "shown_faster": speed.faster(one, other),
            }
            for (one, other), effect in speed.differences.items()
        ],
    }


def _cell_json(cell: Cell) -> dict[str, Any]:
    step, sent = cell.step, cell.interface_bytes
    return {
        "ranks": cell.row.world_size,
        "nodes": cell.row.nodes,
        "step_seconds": {"value": step.value, "low": step.low, "high": step.high, "n": step.n},
        "step_seconds_by_repeat": {str(n): value for n, value in cell.step_seconds.items()},
        "formula_bytes": cell.formula_bytes,
        "interface_bytes": None if sent is None else sent.value,
        "between_nodes_bytes": cell.between_nodes_bytes,
    }
