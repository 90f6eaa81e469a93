"""Tables, numbers and figures of strategies over links of several speeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isinf
from pathlib import Path
from typing import Any

from benchmarks.cluster.link_speeds import (
    Cell,
    Speed,
    labels_of,
)
from benchmarks.cluster.link_speeds_facts import facts_table
from benchmarks.cluster.link_speeds_figures import MEGABYTE, figures_of
from benchmarks.cluster.link_speeds_runs import (
    around,
    calm_of,
    calm_table,
    environments,
    load_lines,
    over_all,
    runs_table,
)
from benchmarks.cluster.link_speeds_turns import Turn, crossings_of, turns_of
from benchmarks.recording import Table, place

from shardmark.analysis.statistics.intervals import Estimate
from shardmark.report.figures.drawing import draw, write_images

NAME = "link-speeds"
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
STEPS_NOTE = (
    "Seconds for a step of all ranks' samples, from the throughput of the measured windows, with"
    " the 95 % interval over the repeats; in brackets the place at that speed, by the mean, among"
    " those on as many ranks."
)
BYTES_NOTE = (
    "MB (10^6 bytes) sent for each training rank and step, mean over the repeats: between nodes /"
    " over all interfaces, the loopback included. formula: what the strategy's"
    " definition needs within nodes and between them; the second number compares with it."
)
WINNERS_NOTE = (
    "The fastest by the mean, and all that are not shown to be slower than it, the fastest first."
)
TURNS_NOTE = (
    "Pairs with the fastest at one of the speeds. A pair is named where its order is shown at both"
    " speeds, by the test behind the verdicts of `compare` (moderated t tests of the paired log"
    " ratios, corrected by Holm's method for all pairs at a speed), and is not the same."
)


def write_table(speeds: Sequence[Speed], out: Path, command: str) -> list[Path]:
    """`DATE-link-speeds.json`, `.md`, and both figures as `.png` and `.svg`; the paths."""
    where = around(environments(speeds))
    stem = f"{where['date'][:10]}-{NAME}"
    turns = turns_of(speeds)
    out.mkdir(parents=True, exist_ok=True)
    content = {
        "benchmark": NAME,
        **where,
        "command": command,
        "speeds": [_speed_json(speed, speeds[0]) for speed in speeds],
        "turns": [
            {"first": t.first, "second": t.second, "before": t.before, "after": t.after}
            for t in turns
        ],
    }
    (out / f"{stem}.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    figures = figures_of(speeds, stem)
    images = write_images(draw(figures), out)
    shown = "\n\n".join(f"![{one.title}]({one.name}.svg)\n\n{one.caption}" for one in figures)
    (out / f"{stem}.md").write_text(
        f"{markdown(speeds, turns)}\n\n{shown}\n\n{place(where)}\n\n`{command}`\n"
    )
    return [out / f"{stem}.json", out / f"{stem}.md", *images]


def markdown(speeds: Sequence[Speed], turns: Sequence[Turn]) -> str:
    """What was run, step times, how calm it was, the turns, and the bytes."""
    cores = around(environments(speeds))["machine"]["cores"]
    parts = [
        f"# {title(speeds)}",
        *_unfinished(speeds),
        facts_table(speeds, cores).markdown(),
        "## Step time",
        steps_table(speeds).markdown(),
        *load_lines(speeds),
        runs_table(speeds).markdown(),
        calm_table(speeds).markdown(),
        "## Where each wins",
        winners_table(speeds).markdown(),
        "## Where the order turns",
        "\n".join(turn_lines(speeds, turns)),
        TURNS_NOTE,
        "## Bytes",
        bytes_table(speeds).markdown(),
    ]
    return "\n\n".join(parts)


def title(speeds: Sequence[Speed]) -> str:
    count = len(speeds)
    number = NUMBERS[count] if count < len(NUMBERS) else str(count)
    return f"Strategies over links of {number} speed{'' if count == 1 else 's'}"


def steps_table(speeds: Sequence[Speed]) -> Table:
    """A line for each strategy, a column for each speed."""
    places = {
        (speed.name, label): number for speed in speeds for label, number in speed.places().items()
    }
    rows = []
    for label in labels_of(speeds):
        cells = [label]
        for speed in speeds:
            cell = speed.cells.get(label)
            number = places.get((speed.name, label))
            cells.append("-" if cell is None else f"{_interval(cell.step)} ({number})")
        rows.append(tuple(cells))
    columns = ("strategy", *(f"{speed.name}, s" for speed in speeds))
    return Table(columns=columns, rows=tuple(rows), notes=(STEPS_NOTE,))


def winners_table(speeds: Sequence[Speed]) -> Table:
    """A line for each speed: what is fastest, and what may be as fast."""
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
        known = [speed.cells[label] for speed in speeds if label in speed.cells]
        formula = next((one.formula_bytes for one in known if one.formula_bytes), None)
        cells = [_bytes(speed.cells.get(label)) for speed in speeds]
        rows.append((label, _megabytes(formula), *cells))
    columns = ("strategy", "formula, MB", *(f"{speed.name}, MB" for speed in speeds))
    return Table(columns=columns, rows=tuple(rows), notes=(BYTES_NOTE,))


def turn_lines(speeds: Sequence[Speed], turns: Sequence[Turn]) -> list[str]:
    """A list in Markdown, of the pairs that have to do with who is fastest."""
    by_name = {speed.name: speed for speed in speeds}
    winners = {speed.comparable[0] for speed in speeds}
    told = [turn for turn in turns if winners & {turn.first, turn.second}]
    more = len(crossings_of(speeds)) - len({frozenset((one.first, one.second)) for one in turns})
    rest = f"Pairs whose order changes in the means alone, not shown at both speeds: {more}."
    if not turns:
        return [f"No pair of strategies is shown to change its order. {rest}"]
    lines = []
    for turn in told:
        sides = [(turn.before, turn.first, turn.second), (turn.after, turn.second, turn.first)]
        words = [
            f"at {name} {fast} is faster by {_percent(by_name[name], fast, slow)}"
            for name, fast, slow in sides
        ]
        lines.append(f"- {turn.first} and {turn.second}: {', '.join(words)}.")
    return [*lines, "", f"Further pairs shown to turn: {len(turns) - len(told)}. {rest}"]


def _unfinished(speeds: Sequence[Speed]) -> list[str]:
    parts = [f"{s.name} ({len(s.run.trials)} of {s.planned})" for s in speeds if not s.complete]
    return [f"**Not complete, trials: {', '.join(parts)}.**"] if parts else []


def _percent(speed: Speed, fast: str, slow: str) -> str:
    effect = speed.differences.get((fast, slow)) or speed.differences[slow, fast]
    ratio = effect.ratio.value
    return f"{100 * (max(ratio, 1 / ratio) - 1):.0f} %"


def _interval(found: Estimate) -> str:
    text = f"{found.value:.3f}"
    return text if found.half_width is None else f"{text} ±{found.half_width:.3f}"


def _bytes(cell: Cell | None) -> str:
    if cell is None or cell.interface_bytes is None:
        return "-"
    return f"{_megabytes(cell.between_nodes_bytes)} / {_megabytes(cell.interface_bytes.value)}"


def _megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / MEGABYTE:.1f}"


def _speed_json(speed: Speed, fastest: Speed) -> dict[str, Any]:
    ratio = over_all(speed, fastest)
    return {
        "speed": speed.name,
        "gigabits_per_second": None
        if isinf(speed.gigabits_per_second)
        else speed.gigabits_per_second,
        "trials": len(speed.run.trials),
        "planned": speed.planned,
        "not_calm": calm_of(speed),
        "peak_bytes_per_second": speed.peak_bytes_per_second,
        "step_time_over_fastest_links": None if ratio is None else _estimate(ratio),
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
        "step_seconds": _estimate(step),
        "step_seconds_by_repeat": {str(n): value for n, value in cell.step_seconds.items()},
        "formula_bytes": cell.formula_bytes,
        "interface_bytes": None if sent is None else sent.value,
        "between_nodes_bytes": cell.between_nodes_bytes,
        "peak_bytes_per_second": cell.peak_bytes_per_second,
    }


def _estimate(found: Estimate) -> dict[str, Any]:
    return {"value": found.value, "low": found.low, "high": found.high, "n": found.n}
