"""What little communication costs in quality, and over which links it wins all the same.

    python benchmarks/little_communication.py --run FOLDER [--links FILE] [--small]
        [--steps 200 500 1000] [--seeds 0 1 2] [--periods 5 20 100]

The small GPT of `experiments/four-links-language.yaml` learns the standard library's source on 4
ranks, with `ddp`, with compressed gradients, and with local steps, in an ordinary run: FOLDER keeps
it, and the same command goes on where it was stopped.  Quality is bits per byte of held-out text
after trainings of several lengths, each with its own learning rates from beginning to end.  Other
work on the machine changes no quality.

At equal samples, every training has taken as many steps.  At equal time, each takes as many steps
as fit into the time that the fastest needs for the longest training, by the step times of FILE:
what `python -m benchmarks.cluster links-table` stored of that experiment.  Quality between two
lengths is interpolated over the logarithm of the steps, seed by seed.  A step of local steps is one
alone and its part of a meeting: of periods that were not measured it follows from two that were.

Intervals are 95 % over seeds; differences to `ddp` are of the same seed, which begins with the same
weights and the same order of samples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from recording import ROOT, Table, options_of, store, surroundings
from shardmark import run
from shardmark.analysis.statistics.intervals import Estimate, estimate_difference, estimate_mean
from sides import add_sources_to_path

NAME = "little_communication"
EXPERIMENT = ROOT / "experiments" / "four-links-language.yaml"
BAR = "Bar: none, it says what is won and what is lost"
METRIC = "bits_per_byte"
LOCAL = ("local-sgd", "diloco")
REFERENCE = "ddp"
Curves = dict[str, dict[int, dict[int, float]]]
"""Strategy -> seed -> steps -> bits per byte."""


def experiment(
    steps: Sequence[int], seeds: Sequence[int], periods: Sequence[int]
) -> dict[str, Any]:
    """That of the links, on this machine alone."""
    made: dict[str, Any] = yaml.safe_load(EXPERIMENT.read_text(encoding="utf-8"))
    del made["placement"], made["recipe"]["steps"]
    local = [{"name": name, "period_steps": period} for name in LOCAL for period in periods]
    compressed = [{"name": REFERENCE, "compress": kind} for kind in ("bf16", "powersgd")]
    return made | {
        "name": NAME.replace("_", "-"),
        "matrix": {
            "strategy": [REFERENCE, *compressed, *local],
            "world_size": [4],
            "recipe.steps": list(steps),
            "recipe.seed": list(seeds),
        },
        "measure": {
            "repeats": 1,
            "max_remeasure": 0,
            "probe": False,
            "verify": False,
            "evaluate": "end",
        },
        "limits": {"trial_seconds": 3600},
    }


def curves_of(mapping: Mapping[str, Any], folder: Path) -> Curves:
    found: Curves = {}
    for row in run(mapping, folder).compare().rows:
        quality = row.metrics[METRIC]
        if quality is None:
            raise SystemExit(f"{row.place}: {row.missing.get(METRIC)}, {dict(row.outcomes)}")
        seed, steps = row.varied["recipe.seed"], row.varied["recipe.steps"]
        found.setdefault(row.label, {}).setdefault(seed, {})[steps] = quality.value
    return found


def step_seconds(links: Mapping[str, Any], labels: Sequence[str]) -> dict[str, dict[str, float]]:
    """Link speed -> strategy -> mean seconds of a step, where known."""
    found = {}
    for speed in links["speeds"]:
        measured = {
            name: cell["step_seconds"]["value"] for name, cell in speed["strategies"].items()
        }
        own = {label: measured[label] for label in labels if label in measured}
        own |= {label: s for label in labels if (s := calculated(label, measured)) is not None}
        found[speed["speed"]] = own
    return found


def calculated(label: str, measured: Mapping[str, float]) -> float | None:
    """Seconds of a step of a period that was not measured, from the two longest that were.

    A step of a period H lasts a + b / H.
    """
    name, _, period = label.partition(" (period_steps=")
    if label in measured or not period:
        return None
    known = sorted(
        (int(other.rpartition("=")[2].rstrip(")")), seconds)
        for other, seconds in measured.items()
        if other.startswith(f"{name} (period_steps=")
    )
    if len(known) < 2:
        return None
    (shorter, more), (longer, less) = known[-2:]
    meeting = (more - less) / (1 / shorter - 1 / longer)
    return less + meeting * (1 / int(period.rstrip(")")) - 1 / longer)


def after(steps: float, curve: Mapping[int, float]) -> float | None:
    """Quality after so many steps; None where no training was as short."""
    lengths = sorted(curve)
    if steps < lengths[0]:
        return None
    if steps >= lengths[-1]:
        return curve[lengths[-1]]
    after_it = next(index for index, length in enumerate(lengths) if length > steps)
    short, long = lengths[after_it - 1], lengths[after_it]
    part = math.log(steps / short) / math.log(long / short)
    return (1 - part) * curve[short] + part * curve[long]


def at_equal_time(
    curves: Curves, seconds: Mapping[str, float]
) -> tuple[float, dict[str, dict[str, Any]]]:
    """The time, and what each strategy makes of it."""
    most = max(length for curve in next(iter(curves.values())).values() for length in curve)
    time = most * min(seconds.values())
    found = {}
    for label, each in seconds.items():
        steps = min(time / each, most)
        by_seed = {seed: after(steps, curve) for seed, curve in curves[label].items()}
        if None not in by_seed.values():
            found[label] = {"steps": round(steps), "bits_per_byte": by_seed}
    return time, found


def versus(one: Mapping[int, float], other: Mapping[int, float]) -> Estimate:
    return estimate_difference([one[seed] - other[seed] for seed in sorted(one)])


def shown(value: Estimate, *, signed: bool = False) -> str:
    half = "" if value.half_width is None else f" ±{value.half_width:.3f}"
    return f"{value.value:{'+' if signed else ''}.3f}{half}"


def line_of(speed: str, seconds: float, found: Mapping[str, Mapping[str, Any]]) -> str:
    """What wins over these links."""
    means = {name: estimate_mean([*one["bits_per_byte"].values()]) for name, one in found.items()}
    best = min(means, key=lambda name: means[name].value)
    text = f"{speed}: after {seconds:.0f} s {best} has least bits per byte, {shown(means[best])}"
    if REFERENCE not in found:
        return f"{text}; {REFERENCE} has not taken the steps of the shortest training."
    if best == REFERENCE:
        return f"{text}."
    won = versus(found[best]["bits_per_byte"], found[REFERENCE]["bits_per_byte"])
    sure = won.high is not None and won.high < 0
    return (
        f"{text}; beside {REFERENCE} {shown(won, signed=True)}, "
        f"{'shown' if sure else 'not shown'} to be better."
    )


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--run", type=Path, required=True, help="keeps the trainings")
    parser.add_argument("--links", type=Path, help="JSON of `links-table`: step time by link speed")
    parser.add_argument("--steps", type=int, nargs="+", help="of each training")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--periods", type=int, nargs="+")
    options = parser.parse_args()
    add_sources_to_path()
    steps = options.steps or ([20, 40] if options.small else [200, 500, 1000])
    seeds = options.seeds or ([0, 1] if options.small else [0, 1, 2])
    periods = options.periods or ([5, 20] if options.small else [5, 20, 100])
    around = surroundings()
    curves = curves_of(experiment(steps, seeds, periods), options.run)
    longest = {
        label: {seed: curve[max(steps)] for seed, curve in by_seed.items()}
        for label, by_seed in curves.items()
    }
    times: dict[str, tuple[float, dict[str, dict[str, Any]]]] = {}
    seconds: dict[str, dict[str, float]] = {}
    if options.links is not None:
        seconds = step_seconds(json.loads(options.links.read_text()), list(curves))
        times = {speed: at_equal_time(curves, own) for speed, own in seconds.items() if own}

    def cells(label: str) -> tuple[str, ...]:
        same = (
            shown(estimate_mean([curve[length] for curve in curves[label].values()]))
            for length in steps
        )
        lost = versus(longest[label], longest[REFERENCE])
        price = "" if label == REFERENCE else shown(lost, signed=True)
        return (label, *same, price, *(in_time(found.get(label)) for _, found in times.values()))

    def in_time(one: Mapping[str, Any] | None) -> str:
        if one is None:
            return "-"
        return f"{shown(estimate_mean([*one['bits_per_byte'].values()]))} ({one['steps']})"

    notes = [
        f"Bits per byte of held-out text, {len(seeds)} seeds, 95 % intervals; 4 ranks."
        f" Price: beside {REFERENCE} after {max(steps)} steps, seed by seed."
        " Over links: at equal time, in brackets the steps that fit into it. The best is chosen"
        " among all, for which no interval is corrected; that of step times is not in them.",
        *(line_of(speed, time, found) for speed, (time, found) in times.items()),
    ]
    store(
        NAME,
        options=options,
        around=around,
        bar=BAR,
        holds=True,
        table=Table(
            columns=(
                "strategy",
                *(f"{length} steps" for length in steps),
                "price",
                *(f"{speed}, {time:.0f} s" for speed, (time, _) in times.items()),
            ),
            rows=tuple(map(cells, sorted(curves, key=lambda name: fmean(longest[name].values())))),
            notes=tuple(notes),
        ),
        numbers={
            "curves": curves,
            "step_seconds": seconds,
            "equal_time": {
                speed: {"seconds": time, "strategies": found}
                for speed, (time, found) in times.items()
            },
        },
    )


if __name__ == "__main__":
    main()
