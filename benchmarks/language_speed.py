"""Tokens per second of a trial of `language-quickstart` over a loop in nanoGPT's style.

    python benchmarks/language_speed.py --starts 5 [--pairs 10] [--strategies tp pp] [--small]
    python benchmarks/language_speed.py [--pairs 9] [--steps 400] [--strategies single ddp]

A pair is a run of one trial with all metrics on, and `bare_language.py` with the same model, tokens
and strategy; both take turns as in `overhead.py`.  With `--starts`, both start so often a strategy,
and the pairs are their turns of 3 seconds.  A start takes half a minute, and one is not like the
next: the same loop, started anew, was up to a tenth faster or slower for good.
"""

from __future__ import annotations

import argparse
from functools import partial
from importlib.resources import files
from typing import Any

import yaml

from bare_language import STRATEGIES, Bare
from overhead import TURN_SECONDS, measure, options_from, pair_of, threads_of
from shardmark.workloads import check_data
from shardmark.workloads.language.options import LanguageOptions
from sides import WARMUP_STEPS, add_sources_to_path, script_command

NAME = "language_speed"
PRESET = files("shardmark.config") / "presets" / "language-quickstart.yaml"
UNIT = "tokens/s"
SHORT_TURN_SECONDS = 3.0
STEPS = {True: 100, False: 400}
"""Of a training with a start of its own, small or not."""


def experiment_of(bare: Bare, steps: int) -> dict[str, Any]:
    """The preset with one strategy, evaluation left out."""
    experiment: dict[str, Any] = yaml.safe_load(PRESET.read_text(encoding="utf-8"))
    experiment["recipe"]["steps"] = steps
    experiment["matrix"] = {"strategy": [bare.strategy], "world_size": [bare.ranks]}
    experiment["measure"] = {
        "repeats": 1,
        "warmup_steps": WARMUP_STEPS,
        "probe": True,
        "evaluate": "never",
    }
    return experiment | {"limits": {"trial_seconds": 900}, "device": "cpu"}


def measure_pair(strategy: str, pair: int, *, options: argparse.Namespace) -> dict[str, Any]:
    bare = STRATEGIES[strategy]
    if options.starts:
        pairs = options.pairs or (2 if options.small else 9)
        turns = 1 + -(-pairs // options.starts)  # the last one is not whole
        steps = options.steps or WARMUP_STEPS + turns * bare.turn_steps
    else:
        steps = options.steps or STEPS[options.small]
    experiment = experiment_of(bare, steps)
    batch: int = experiment["recipe"]["global_batch"]
    threads = threads_of(bare.ranks)
    return pair_of(
        strategy,
        pair,
        experiment=experiment,
        bare=lambda out: script_command(
            "bare_language.py",
            *("--strategy", strategy, "--steps", str(steps), "--warmup", str(WARMUP_STEPS)),
            *("--global-batch", str(batch)),
            ranks=bare.ranks,
            threads=threads,
            out=out,
        ),
        threads=threads,
        a_step=batch * experiment["workload"]["sequence_length"],
        unit=UNIT,
        turn_seconds=SHORT_TURN_SECONDS if options.starts else TURN_SECONDS,
    )


def main() -> None:
    parser = options_from(NAME, __doc__, [*STRATEGIES])
    parser.add_argument("--starts", type=int, help="pairs are turns of so many starts")
    options = parser.parse_args()
    add_sources_to_path()
    check_data(LanguageOptions())  # both sides find the tokens made
    measure(
        NAME,
        options,
        partial(measure_pair, options=options),
        least_ratios={name: bare.least_ratio for name, bare in STRATEGIES.items()},
        starts=options.starts,
        unit=UNIT,
    )


if __name__ == "__main__":
    main()
