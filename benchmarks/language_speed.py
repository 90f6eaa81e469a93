"""Tokens per second of a trial of `language-quickstart` over a loop in nanoGPT's style.

    python benchmarks/language_speed.py [--pairs 9] [--steps 400] [--strategies ddp] [--small]

A pair is a run of one trial with all metrics on, and `bare_language.py` with the same model and
tokens; both take turns as in `overhead.py`.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import yaml

from overhead import measure, options_from, pair_of, threads_of
from shardmark.workloads import check_data
from shardmark.workloads.language.options import LanguageOptions
from sides import WARMUP_STEPS, add_sources_to_path, ranks_of, script_command

NAME = "language_speed"
STRATEGIES = ("single", "ddp")
PRESET = files("shardmark.config") / "presets" / "language-quickstart.yaml"
UNIT = "tokens/s"


def experiment_of(strategy: str, steps: int) -> dict[str, Any]:
    """The preset with one strategy, evaluation left out."""
    experiment: dict[str, Any] = yaml.safe_load(PRESET.read_text(encoding="utf-8"))
    experiment["recipe"]["steps"] = steps
    experiment["matrix"] = {"strategy": [strategy]}
    experiment["measure"] = {"warmup_steps": WARMUP_STEPS, "probe": True, "evaluate": "never"}
    return experiment | {"limits": {"trial_seconds": 900}, "device": "cpu"}


def measure_pair(strategy: str, pair: int, steps: int) -> dict[str, Any]:
    experiment = experiment_of(strategy, steps)
    batch: int = experiment["recipe"]["global_batch"]

    return pair_of(
        strategy,
        pair,
        experiment=experiment,
        bare=lambda out: script_command(
            "bare_language.py",
            *("--strategy", strategy, "--steps", str(steps), "--warmup", str(WARMUP_STEPS)),
            *("--global-batch", str(batch)),
            ranks=ranks_of(strategy),
            threads=threads_of(strategy),
            out=out,
        ),
        a_step=batch * experiment["workload"]["sequence_length"],
        unit=UNIT,
    )


def main() -> None:
    options = options_from(NAME, __doc__, STRATEGIES)
    add_sources_to_path()
    check_data(LanguageOptions())  # both sides find the tokens made
    measure(NAME, options, measure_pair, steps_of=(100, 400), unit=UNIT)


if __name__ == "__main__":
    main()
