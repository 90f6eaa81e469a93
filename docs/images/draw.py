"""Draws the pictures of this folder from stored results: `python docs/images/draw.py`.

Another folder may be named; a test does so, and compares the pictures with the stored ones.  A
picture is one panel wide, so that a telephone shows its text in a readable size.
"""

from __future__ import annotations

import json
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from shardmark.base.results.store import StoredRun, load_run
from shardmark.bench.analysis.compare.comparison import compare
from shardmark.bench.report.figures import figures_of
from shardmark.bench.report.figures.chart import Figure, Panel, Series, figure, stacked_panel
from shardmark.bench.report.figures.drawing import REFERENCE, draw, figure_svg
from shardmark.bench.report.figures.measured import trade_off_panel

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
MEBIBYTE, GIBIBYTE, MEGABYTE = 2**20, 2**30, 1e6
RATE, PEAK = "samples_per_second", "peak_memory_bytes"
KINDS = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer state": "optimizer_state_bytes",
}


def main(folder: Path) -> None:
    """Draw every picture into the folder."""
    for name, make in PICTURES.items():
        (drawing,) = draw(make())
        (folder / f"{name}.svg").write_text(figure_svg(drawing), encoding="utf-8")


def stored(name: str, suffix: str = ".json") -> Path:
    """Return the newest stored result of this name."""
    dated = sorted(RESULTS.glob(f"20??-??-??-{name}{suffix}"))
    if not dated:
        raise SystemExit(f"no {name}{suffix} in {RESULTS}")
    return dated[-1]


@cache
def result(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(stored(name).read_text(encoding="utf-8"))
    return read


@contextmanager
def stored_run(name: str) -> Iterator[StoredRun]:
    """Unpack the newest stored run of this name."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(stored(name, ".tar.xz")) as archive:
            archive.extractall(folder, filter="data")
        (path,) = Path(folder).iterdir()
        yield load_run(path)


@cache
def figures_of_run(name: str) -> dict[str, Figure]:
    """Return the figures of the report of a stored run, by name."""
    with stored_run(name) as run:
        return {one.name: one for one in figures_of(compare([run]))}


def panel_of_run(run: str, name: str, number: int, caption: str) -> list[Figure]:
    """Return one panel of a figure of the report."""
    drawn = figures_of_run(run)[name]
    panel = drawn.panels[number]
    return figure(
        name, drawn.title, [replace(panel, series=tuple(map(clear, panel.series)))], caption
    )


def clear(series: Series) -> Series:
    """Return the series without marks of disturbed times, which change no loss and no memory."""
    return replace(series, faint=())


def rows(name: str) -> list[dict[str, Any]]:
    return [row for row in result(name)["rows"] if row["metrics"].get(RATE)]


def value(row: Mapping[str, Any], metric: str) -> float | None:
    estimate = row["metrics"].get(metric)
    return None if estimate is None else float(estimate["value"])


def bars(
    title: str,
    unit: str,
    estimates: Mapping[str, Mapping[str, float | None]],
    styles: Mapping[str, int] | None = None,
    scale: float = 1.0,
) -> Panel:
    """Return a bar for each name, with the 95 % interval of its estimate."""

    def scaled(estimate: Mapping[str, float | None], key: str) -> float | None:
        end = estimate.get(key)
        return None if end is None else end * scale

    return Panel(
        title="",
        kind="bars",
        y_label=f"{title} ({unit})",
        y_unit=unit,
        series=tuple(
            Series(
                name=name,
                x=(name,),
                y=(scaled(estimate, "value"),),
                low=(scaled(estimate, "low"),),
                high=(scaled(estimate, "high"),),
                style=number if styles is None else styles[name],
            )
            for number, (name, estimate) in enumerate(estimates.items())
        ),
    )


def agreement(panel_series: Sequence[Series], unit: str, x_label: str, y_label: str) -> Panel:
    """Return points on logarithmic axes, with a dashed line on which both values agree."""
    xs = [float(x) for one in panel_series for x in one.x]
    ys = [y for one in panel_series for y in one.y if y is not None]
    ends = (min([*xs, *ys]), max([*xs, *ys]))
    line = Series(name="agreement", x=ends, y=ends, style=REFERENCE, dashed=True)
    return Panel(
        title="",
        kind="points",
        x_label=f"{x_label} ({unit})",
        y_label=f"{y_label} ({unit})",
        x_unit=unit,
        y_unit=unit,
        series=(line, *panel_series),
        x_logarithmic=True,
        y_logarithmic=True,
        y_from_zero=False,
        y_bounds=(ends[0] / 1.3, ends[1] * 1.3),
    )


# The first comparison and the first script


def throughput_memory() -> list[Figure]:
    measured = rows("quickstart")
    cells = [
        Series(
            name=row["strategy"],
            style=number,
            x=[(value(row, PEAK) or 0.0) / MEBIBYTE],
            y=[value(row, RATE)],
            low=[row["metrics"][RATE]["low"]],
            high=[row["metrics"][RATE]["high"]],
            text=[row["strategy"]],
            places=[row["strategy"]],
        )
        for number, row in enumerate(measured)
    ]
    points = [(float(cell.x[0]), cell.y[0] or 0.0) for cell in cells]
    return figure(
        "throughput-memory",
        "Speed against memory",
        [trade_off_panel("", cells, points, "MiB")],
        "A small vision transformer on 2 cores. Better is up and to the left.",
    )


def quickstart_memory() -> list[Figure]:
    panel = stacked_panel(
        "",
        "Peak memory of a rank",
        "MiB",
        [
            (row["strategy"], number, memory_parts({k: value(row, k) for k in row["metrics"]}))
            for number, row in enumerate(rows("quickstart"))
        ],
        MEBIBYTE,
    )
    caption = "A vision transformer with AdamW: single on 1 rank, the others on 2."
    return figure("quickstart-memory", "Peak memory by kind", [panel], caption)


def memory_parts(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return bytes by kind; what no kind has is activations, buffers and temporary tensors."""
    parts = {kind: metrics[name] for kind, name in KINDS.items()}
    rest = (metrics[PEAK] or 0.0) - sum(size or 0.0 for size in parts.values())
    return {**parts, "activations and other": max(0.0, rest)}


def quickstart_step_time() -> list[Figure]:
    def parts(row: Mapping[str, Any]) -> dict[str, float | None]:
        step = row["step"]
        shown = {part["kind"].replace("_", " "): part["seconds"]["value"] for part in step["parts"]}
        return {"computing": step["computing_seconds"], **shown}

    panel = stacked_panel(
        "",
        "Time of a step",
        "ms",
        [(row["strategy"], number, parts(row)) for number, row in enumerate(rows("quickstart"))],
        1e-3,
    )
    caption = "Mean step. Communication is what nothing hides: a rank only waits for others."
    return figure("quickstart-step-time", "Where a step's time goes", [panel], caption)


def script_throughput() -> list[Figure]:
    estimates = {row["strategy"]: row["metrics"][RATE] for row in rows("time-script")}
    caption = "Both commands of train.py on 2 ranks, with 95 % intervals of 5 and 6 repeats."
    panel = bars("Throughput", "samples/s", estimates)
    return figure("script-throughput", "Which variant is faster?", [panel], caption)


# Networks


LINK_STRATEGIES = {
    "ddp": "ddp",
    "ddp (compress=bf16)": "ddp, bf16 messages",
    "local-sgd (period_steps=20)": "local-sgd",
    "zero-2": "zero-2",
    "fsdp": "fsdp",
}
"""Some strategies of the result, and their names in the pictures."""
GIGABITS = {"200mbit": 0.2, "1gbit": 1.0, "10gbit": 10.0}


def links_step_time() -> list[Figure]:
    speeds = {one["speed"]: one["strategies"] for one in result("link-speeds")["speeds"]}

    def line(number: int, name: str) -> Series:
        estimates = [speeds[speed][name]["step_seconds"] for speed in GIGABITS]
        return Series(
            name=LINK_STRATEGIES[name],
            style=number,
            x=tuple(GIGABITS.values()),
            y=[one["value"] * 1e3 for one in estimates],
            low=[one["low"] * 1e3 for one in estimates],
            high=[one["high"] * 1e3 for one in estimates],
        )

    panel = Panel(
        title="",
        kind="line",
        x_label="Link of each node (Gbit/s)",
        y_label="Time of a step (ms)",
        x_unit="Gbit/s",
        y_unit="ms",
        series=tuple(line(number, name) for number, name in enumerate(LINK_STRATEGIES)),
        x_logarithmic=True,
        x_ticks=tuple(GIGABITS.values()),
    )
    caption = "A small GPT on 2 nodes with 2 ranks each; the nodes share the cores of one machine."
    return figure("links-step-time", "Slow links change the order", [panel], caption)


def links_bytes() -> list[Figure]:
    """Draw the bytes of every strategy that sends some."""
    (unlimited,) = (s for s in result("link-speeds")["speeds"] if s["speed"] == "unlimited")
    sending = {n: one for n, one in unlimited["strategies"].items() if one["formula_bytes"]}
    named = {name: one for name, one in sending.items() if name in LINK_STRATEGIES}
    points = [
        Series(
            name="strategies",
            style=0,
            x=[one["formula_bytes"] / MEGABYTE for one in members.values()],
            y=[one["interface_bytes"] / MEGABYTE for one in members.values()],
            text=texts,
            places=[*members],
        )
        for members, texts in (
            (named, [LINK_STRATEGIES[name] for name in named]),
            ({name: one for name, one in sending.items() if name not in named}, None),
        )
    ]
    panel = agreement(points, "MB", "By formula", "Counted on the interfaces")
    caption = f"Bytes of a step of {len(sending)} strategies. On the dashed line both agree."
    return figure("links-bytes", "Bytes by formula and as counted", [panel], caption)


# Predictions


def predicted_memory() -> list[Figure]:
    """Draw each strategy's predicted and measured peak on every model."""
    by_strategy: dict[str, list[tuple[float, float]]] = {}
    for name in ("predict-memory", "predict-memory-others"):
        for model in result(name)["numbers"]["models"].values():
            for strategy, one in model.items():
                pair = (one["predicted"]["peak"] / MEGABYTE, one["measured"] / MEGABYTE)
                by_strategy.setdefault(strategy, []).append(pair)
    pairs = [pair for members in by_strategy.values() for pair in members]
    points = Series(
        name="a strategy on a model",
        style=0,
        x=[predicted for predicted, _ in pairs],
        y=[measured for _, measured in pairs],
        places=[name for name, members in by_strategy.items() for _ in members],
    )
    panel = agreement([points], "MB", "Predicted peak", "Measured peak")
    caption = f"{len(pairs)} cells: {len(by_strategy)} strategies on up to 8 models, on the CPU."
    return figure("predicted-memory", "Predicted and measured memory", [panel], caption)


def predicted_speeds() -> list[Figure]:
    """Draw the published and the predicted speed of every run, with lines of a factor of 1.3."""
    by_kind = result("predict")["numbers"]["speeds"]
    marks = [
        Series(
            name=kind,
            style=number,
            x=[published for published, _ in runs.values()],
            y=[predicted for _, predicted in runs.values()],
            places=[*runs],
        )
        for number, (kind, runs) in enumerate(by_kind.items())
    ]
    panel = agreement(marks, "TFLOP/s of a GPU", "Published", "Predicted")
    equal = panel.series[0]
    factors = [
        replace(
            equal,
            name=name,
            x=tuple(float(x) for x in equal.x),
            y=tuple(factor * (y or 0.0) for y in equal.y),
            raw=True,
        )
        for name, factor in (("1.3 times", 1.3), ("1 / 1.3", 1 / 1.3))
    ]
    pairs = [pair for runs in by_kind.values() for pair in runs.values()]
    inside = sum(1 / 1.3 <= published / predicted <= 1.3 for published, predicted in pairs)
    caption = f"{len(pairs)} published runs, {inside / len(pairs):.0%} within a factor of 1.3."
    panel = replace(panel, series=(equal, *factors, *marks))
    return figure("predicted-speeds", "Speed without a measurement", [panel], caption)


def largest_batch() -> list[Figure]:
    found = result("largest-batch")["numbers"]["found"]
    series = [
        Series(
            name=model,
            style=number,
            x=[one["predicted"] for one in strategies.values()],
            y=[one["bisected"] for one in strategies.values()],
            places=[f"{model}, {name}" for name in strategies],
        )
        for number, (model, strategies) in enumerate(found.items())
    ]
    panel = agreement(series, "samples", "Predicted", "Found by trials")
    caption = "Largest batch of a rank: 8 strategies of each model, in limited memory."
    return figure("largest-batch", "The largest batch", [panel], caption)


def plan_memory() -> list[Figure]:
    def parts(row: Mapping[str, Any]) -> dict[str, float | None]:
        kinds = {kind: float(row[f"{kind.replace(' ', '_')}_bytes"]) for kind in KINDS}
        return {**kinds, "activations and other": row["device_bytes"] - sum(kinds.values())}

    planned = sorted(result("plan-8xh100")["rows"], key=lambda row: -float(row["device_bytes"]))
    panel = stacked_panel(
        "",
        "Memory of a card",
        "GiB",
        [(row["strategy"], number, parts(row)) for number, row in enumerate(planned)],
        GIBIBYTE,
    )
    caption = "Llama 3.1 8B on 8 H100 of 80 GiB, predicted: all strategies but ddp fit."
    return figure("plan-memory", "What fits?", [panel], caption)


def plan_speed() -> list[Figure]:
    planned = sorted(
        result("plan-8xh100")["rows"], key=lambda row: -float(row["tokens_per_second"]["value"])
    )
    estimates = {row["strategy"]: row["tokens_per_second"] for row in planned}
    same = dict.fromkeys(estimates, 0)
    panel = bars("Throughput", "thousand tokens/s", estimates, same, scale=1e-3)
    caption = "Llama 3.1 8B on 8 H100, predicted, with 90 % intervals."
    return figure("plan-speed", "What is fastest there?", [panel], caption)


def plan_cost() -> list[Figure]:
    """Draw the cost of every strategy that fits, the cheapest first, a colour for each machine."""
    fitting = [row for row in result("plan-machines")["rows"] if row["fits"] != "no"]
    billion = {
        (row["on"], row["strategy"]): row["dollars"] * 1e9 / row["trained_tokens"]
        for row in fitting
    }
    machines = list(dict.fromkeys(machine for machine, _ in billion))
    cheapest = sorted(billion, key=lambda key: billion[key])
    panel = bars(
        "Cost of a billion tokens",
        "dollars",
        {f"{machine}, {name}": {"value": billion[machine, name]} for machine, name in cheapest},
        {f"{machine}, {name}": machines.index(machine) for machine, name in cheapest},
    )
    caption = "Llama 3.1 8B, at 2.50 dollars for an hour of either card, predicted."
    return figure("plan-cost", "Which machine is cheaper?", [panel], caption)


# Texts


def language_loss() -> list[Figure]:
    """Draw one line over another; the caption has the last values, which no mark has."""
    lines = figures_of_run("my-texts")["loss-by-step"].panels[0].series
    last = ", ".join(f"{line.name} {line.y[-1]:.4f}" for line in lines)
    return panel_of_run("my-texts", "loss-by-step", 0, f"They end at {last}.")


def language_memory() -> list[Figure]:
    return panel_of_run("my-texts", "memory", 0, "A small GPT on 2 ranks.")


# Method


def convergence() -> list[Figure]:
    epochs = result("convergence")["epochs"]
    same = ("ddp", "fsdp", "zero-1")
    series = []
    for number, name in enumerate(("ddp", "local-sgd", "ps-async")):
        lines = [line for line in epochs if line["strategy"] == name]
        values, low, high = zip(*(line["accuracy_top1"] for line in lines), strict=True)
        series.append(
            Series(
                name=", ".join(same) if name in same else name,
                style=number,
                x=[line["epoch"] for line in lines],
                y=[100 * y for y in values],
                low=[100 * y for y in low],
                high=[100 * y for y in high],
            )
        )
    for name in same[1:]:  # they have one line
        if of_strategy(epochs, name) != of_strategy(epochs, same[0]):
            raise SystemExit(f"{name} does not coincide with {same[0]}: draw a line for it")
    panel = Panel(
        title="",
        kind="line",
        x_label="Epoch",
        y_label="Top-1 (%)",
        y_unit="%",
        x_whole=True,
        series=tuple(series),
    )
    caption = "Small network on 2 ranks. Lines: means of 3 seeds. Areas: their 95 % intervals."
    return figure("convergence", "Accuracy by epoch", [panel], caption)


def of_strategy(epochs: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """Return the accuracies of a strategy by epoch."""
    return [line["accuracy_top1"] for line in epochs if line["strategy"] == name]


def hand_written_loops() -> list[Figure]:
    ratios = result("step-speed")["numbers"]["ratios"]
    panel = Panel(
        title="",
        kind="bars",
        y_label="Throughput, % of the loop written by hand",
        y_unit="%",
        series=tuple(
            Series(name=name, x=(name,), y=(one["median"] * 100,), style=0)
            for name, one in ratios.items()
        ),
    )
    caption = "Median of 30 pairs of runs of a small GPT on 2 cores."
    return figure("hand-written-loops", "Beside loops written by hand", [panel], caption)


def startup() -> list[Figure]:
    pairs = result("startup")["numbers"]["pairs"]

    def median_of(name: str, key: str) -> dict[str, float | None]:
        seconds = sorted(pair[key] for pair in pairs[name])
        return {"value": seconds[len(seconds) // 2]}

    estimates = {
        f"{name}: {words}": median_of(name, key)
        for name in pairs
        for key, words in (("shardmark", "trial"), ("bare", "torchrun"))
    }
    styles = {name: int(name.endswith("torchrun")) for name in estimates}
    panel = bars("From launch to the first step", "s", estimates, styles)
    caption = "Median of 5. A trial is a further one of a run; torchrun starts a bare script."
    return figure("startup", "Trials start fast", [panel], caption)


LAWS = ("normal, 5 %", "lognormal, 20 %", "3 %, 1 in 10 disturbed")


def coverage() -> list[Figure]:
    """Draw how often intervals of invented measurements contain the truth."""
    shares = result("statistics-promises")["numbers"]["coverage"]
    series = [
        Series(
            name=law,
            style=number,
            x=[repeats for name, repeats, kind, *_ in shares if (name, kind) == (law, "ours")],
            y=[share * 100 for name, _, kind, share, _ in shares if (name, kind) == (law, "ours")],
        )
        for number, law in enumerate(LAWS)
    ]
    repeats = [float(x) for x in series[0].x]
    promise = Series(
        name="promise",
        x=(min(repeats), max(repeats)),
        y=(95.0, 95.0),
        style=REFERENCE,
        dashed=True,
    )
    panel = Panel(
        title="",
        kind="line",
        x_label="Repeats",
        y_label="Intervals that contain the true mean (%)",
        x_unit="repeats",
        y_unit="%",
        series=(promise, *series),
        x_whole=True,
        y_from_zero=False,
        y_bounds=(90.0, 100.0),
    )
    caption = "10,000 invented experiments for each point, with three kinds of noise."
    return figure("coverage", "95 % intervals keep their promise", [panel], caption)


def detection_memory() -> list[Figure]:
    measured = result("detection-memory")["numbers"]["measured"]
    panel = stacked_panel(
        "",
        "Peak memory of a rank",
        "MB",
        [(name, number, memory_parts(one)) for number, (name, one) in enumerate(measured.items())],
        MEGABYTE,
    )
    caption = "Faster R-CNN with ResNet-50: single on 1 rank, the others on 4 ranks of a CPU."
    return figure("detection-memory", "Memory of a detector", [panel], caption)


PICTURES: Mapping[str, Callable[[], list[Figure]]] = {
    "throughput-memory": throughput_memory,
    "quickstart-memory": quickstart_memory,
    "quickstart-step-time": quickstart_step_time,
    "script-throughput": script_throughput,
    "links-step-time": links_step_time,
    "links-bytes": links_bytes,
    "predicted-memory": predicted_memory,
    "predicted-speeds": predicted_speeds,
    "largest-batch": largest_batch,
    "hand-written-loops": hand_written_loops,
    "startup": startup,
    "coverage": coverage,
    "detection-memory": detection_memory,
    "plan-memory": plan_memory,
    "plan-speed": plan_speed,
    "plan-cost": plan_cost,
    "convergence": convergence,
    "language-loss": language_loss,
    "language-memory": language_memory,
}

if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
