"""Tokens per second of Shardmark's training loop over those of a bare loop, in one process.

    python benchmarks/step_speed.py [--pairs 15] [--steps 10] [--strategies tp pp] [--small]

Each rank holds both: a worker of the strategy in `train`, and the loop of torch's own calls in
`bare_language.py`, each with its own model.  They take turns of a few steps; the side that goes
first alternates.  Both sides share one start, since the same loop, started again, was up to a tenth
faster or slower; processes that a trial has beside its ranks are on neither side.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from bare_language import STRATEGIES, Bare, drawn_batches, take_step
from harness import WARMUP_STEPS, add_sources_to_path, run_script, script_command
from overhead import measure, options_from
from shardmark.config.load import from_mapping
from shardmark.measure.step.recorder import Recorder, clock_for
from shardmark.strategies.base import RankContext
from shardmark.train.epochs import BatchSource
from shardmark.train.loop import LoopOptions, train
from shardmark.train.schedule import Schedule, learning_rate_of
from shardmark.trials.matrix import expand
from shardmark.trials.trial import Trial
from shardmark.workloads import build_workload, check_data
from shardmark.workloads.language.options import LanguageOptions
from shardmark.workloads.language.tokens import token_data

NAME = "step_speed"
PRESET = files("shardmark.config") / "presets" / "language-quickstart.yaml"
UNIT = "tokens/s"
PAIRS = 15
"""Turns of about a second each."""
WARMUP_TURNS = 1
START_SECONDS = 1800.0
RANK = "RANK"
"""The variable that torch's launcher sets in each rank of a pair."""
Turn = Callable[[], None]


def experiment_of(bare: Bare, steps: int) -> dict[str, Any]:
    """The preset with one strategy and without evaluation."""
    experiment: dict[str, Any] = yaml.safe_load(PRESET.read_text(encoding="utf-8"))
    experiment["recipe"]["steps"] = steps
    experiment["matrix"] = {"strategy": [bare.strategy], "world_size": [bare.ranks]}
    measured = {"repeats": 1, "warmup_steps": WARMUP_STEPS, "probe": True, "evaluate": "never"}
    return experiment | {
        "measure": measured,
        "limits": {"trial_seconds": 900},
        "device": "cpu",
    }


def our_turns(trial: Trial, steps: int) -> Turn:
    """Returns a function that takes this many steps as a trial takes them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    context = RankContext(
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        local_world_size=ranks,
        device=torch.device("cpu"),
    )
    workload = build_workload(trial.workload, trial.recipe.seed)
    worker = trial.built_strategy.start(workload, trial.recipe, context)
    schedule = Schedule.of(trial, workload)
    source = BatchSource(
        worker=worker,
        workload=workload,
        plan=schedule.plan,
        shard=trial.layout.ranks[context.rank].share,
        device=context.device,
    )
    options = LoopOptions(
        devices=[context.device],
        seed=trial.recipe.seed,
        learning_rate=learning_rate_of(trial.recipe, schedule.total_steps),
        on_step=lambda _: None,
    )
    recorder = Recorder(clock_for([context.device]))
    recorder.start_training()

    def turn() -> None:
        train(worker, source.until(recorder.step + steps), recorder, options, measured=True)

    return turn


def bare_turns(bare: Bare, trial: Trial, steps: int) -> Turn:
    """Returns a function that takes this many steps of the bare loop."""
    torch.manual_seed(0)
    model: Any = build_workload(trial.workload, trial.recipe.seed).build_model()
    loop = bare.start(model)
    tokens = token_data(LanguageOptions()).training.tokens
    batch, total = trial.recipe.global_batch, trial.recipe.steps
    assert batch is not None
    assert total is not None
    batches = drawn_batches(tokens, batch, loop.share)
    steps_taken = 0

    def turn() -> None:
        nonlocal steps_taken
        for _ in range(steps):
            take_step(loop, steps_taken, total, batches)
            steps_taken += 1

    return turn


def run_rank(options: argparse.Namespace) -> None:
    """Measure both sides of one strategy; rank 0 writes the seconds of each turn of all ranks."""
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo")
    bare = STRATEGIES[options.strategies[0]]
    experiment = experiment_of(bare, options.steps * (options.pairs + WARMUP_TURNS))
    trial = expand(from_mapping(experiment), "cpu").trials[0]
    sides = {"shardmark": our_turns(trial, options.steps)}
    sides["bare"] = bare_turns(bare, trial, options.steps)
    for _ in range(WARMUP_TURNS):
        for turn in sides.values():
            turn()
    gc.collect()
    gc.freeze()
    seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for pair in range(options.pairs):
        for side in [*sides][:: 1 if pair % 2 == 0 else -1]:
            dist.barrier()
            began, processor = time.perf_counter(), time.process_time()
            sides[side]()
            processor = time.process_time() - processor
            dist.barrier()
            seconds[side].append((time.perf_counter() - began, processor))
    all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, seconds)
    if dist.get_rank() == 0:
        (options.out / "ranks.json").write_text(json.dumps(all_ranks))
    dist.barrier()
    dist.destroy_process_group()


def measure_start(strategy: str, start: int, *, options: argparse.Namespace) -> dict[str, Any]:
    """All pairs of a strategy from one start."""
    bare, pairs = STRATEGIES[strategy], options.pairs or (2 if options.small else PAIRS)
    steps = options.steps or (3 if options.small else bare.turn_steps // 3)
    experiment = experiment_of(bare, steps)
    tokens = experiment["recipe"]["global_batch"] * experiment["workload"]["sequence_length"]
    with tempfile.TemporaryDirectory() as folder:
        command = script_command(
            f"{NAME}.py",
            *("--strategies", strategy, "--pairs", str(pairs), "--steps", str(steps)),
            ranks=bare.ranks,
            out=Path(folder),
        )
        run_script(command, ranks=bare.ranks, seconds=START_SECONDS)
        ranks = json.loads((Path(folder) / "ranks.json").read_text())
    clock = {side: [wall for wall, _ in turns] for side, turns in ranks[0].items()}
    processor = {
        side: [
            sum(s for _, s in turn) for turn in zip(*(rank[side] for rank in ranks), strict=True)
        ]
        for side in clock
    }
    turns, by_processor = (
        [bare_s / our_s for our_s, bare_s in zip(of["shardmark"], of["bare"], strict=True)]
        for of in (clock, processor)
    )
    result = {
        "ratio": statistics.median(turns),
        "processor_ratio": statistics.median(by_processor),
        "turns": turns,
        "steps": [steps * pairs] * 2,
        **{side: steps * tokens / statistics.median(of) for side, of in clock.items()},
    }
    print(f"{strategy} start {start}: ratio {result['ratio']:.3f}", flush=True)
    return result


def main() -> None:
    parser = options_from(NAME, __doc__, [*STRATEGIES])
    parser.add_argument("--starts", type=int, default=1, help="starts whose turns are the pairs")
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if RANK in os.environ:
        run_rank(options)
        os._exit(0)  # gloo's threads now and then abort the interpreter as it ends
    add_sources_to_path()
    check_data(LanguageOptions())
    measure(
        NAME,
        options,
        partial(measure_start, options=options),
        least_ratios={name: bare.least_ratio for name, bare in STRATEGIES.items()},
        starts=options.starts,
        unit=UNIT,
    )


if __name__ == "__main__":
    main()
