"""Tokens per second of Shardmark's training loop over those of a bare loop, in one process.

    python benchmarks/step_speed.py [--pairs 15] [--steps 10] [--strategies tp pp] [--small]

Each rank has both: a worker of the strategy in `train`, and `bare_language.py`'s loop of torch's
own calls, with a model each.  They take turns of so many steps; which one goes first alternates.
`language_speed.py` holds whole trials against a script of its own, and its ratio has the luck of
each start in it: the same loop, started anew, was up to a tenth faster or slower for good.  Here
both sides share one start, and what a trial has beside its ranks is on neither.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bare_language import STRATEGIES, Bare, drawn_batches, take_step
from language_speed import UNIT, experiment_of
from overhead import measure, options_from, threads_of
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
from sides import add_sources_to_path, script_command, script_variables

NAME = "step_speed"
PAIRS = 15
"""Turns of about a second each."""
WARMUP_TURNS = 1
RANK = "RANK"
"""Set by torch's launcher: this process is one rank of a pair."""
Turn = Callable[[], None]


def trial_of(bare: Bare, steps: int) -> Trial:
    return expand(from_mapping(experiment_of(bare, steps)), "cpu").trials[0]


def our_turns(trial: Trial, steps: int) -> Turn:
    """So many steps at each call, as a trial takes them."""
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
    torch.manual_seed(0)
    model: Any = build_workload(trial.workload, trial.recipe.seed).build_model()
    loop = bare.start(model)
    tokens = token_data(LanguageOptions()).training.tokens
    batch = trial.recipe.global_batch
    assert batch is not None
    assert trial.recipe.steps is not None
    batches, total = drawn_batches(tokens, batch, loop.share), trial.recipe.steps
    taken = 0

    def turn() -> None:
        nonlocal taken
        for _ in range(steps):
            take_step(loop, taken, total, batches)
            taken += 1

    return turn


def be_rank(options: argparse.Namespace) -> None:
    """Both sides of one strategy; the first rank leaves the seconds of each turn."""
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo")
    bare = STRATEGIES[options.strategies[0]]
    trial = trial_of(bare, options.steps * (options.pairs + WARMUP_TURNS))
    sides = {"shardmark": our_turns(trial, options.steps)}
    sides["bare"] = bare_turns(bare, trial, options.steps)
    for _ in range(WARMUP_TURNS):
        for turn in sides.values():
            turn()
    gc.collect()
    gc.freeze()
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for pair in range(options.pairs):
        for side in [*sides][:: 1 if pair % 2 == 0 else -1]:
            dist.barrier()
            began, spent = time.perf_counter(), time.process_time()
            sides[side]()
            spent = time.process_time() - spent
            dist.barrier()
            found[side].append((time.perf_counter() - began, spent))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        (options.out / "ranks.json").write_text(json.dumps(every))
    dist.barrier()
    dist.destroy_process_group()


def measure_start(strategy: str, start: int, *, options: argparse.Namespace) -> dict[str, Any]:
    """All pairs of a strategy, from one start."""
    bare, pairs = STRATEGIES[strategy], options.pairs or (2 if options.small else PAIRS)
    steps = options.steps or (3 if options.small else bare.turn_steps // 3)
    experiment = experiment_of(bare, steps)
    tokens = experiment["recipe"]["global_batch"] * experiment["workload"]["sequence_length"]
    with tempfile.TemporaryDirectory() as folder:
        command = script_command(
            f"{NAME}.py",
            *("--strategies", strategy, "--pairs", str(pairs), "--steps", str(steps)),
            ranks=bare.ranks,
            threads=threads_of(bare.ranks),
            out=Path(folder),
        )
        done = subprocess.run(
            command,
            env=script_variables(threads_of(bare.ranks)),
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode:
            raise SystemExit(f"{strategy} failed:\n{done.stdout[-4000:]}")
        ranks = json.loads((Path(folder) / "ranks.json").read_text())
    seconds = {side: [clock for clock, _ in ranks[0][side]] for side in ("shardmark", "bare")}
    spent = {
        side: [sum(each) for each in zip(*([s for _, s in rank[side]] for rank in ranks))]  # noqa: B905  (as many)
        for side in seconds
    }
    turns = [b / s for s, b in zip(seconds["shardmark"], seconds["bare"], strict=True)]
    by_processor = [b / s for s, b in zip(spent["shardmark"], spent["bare"], strict=True)]
    found = {
        "ratio": statistics.median(turns),
        "processor_ratio": statistics.median(by_processor),
        "turns": turns,
        "steps": [steps * pairs] * 2,
        **{side: steps * tokens / statistics.median(each) for side, each in seconds.items()},
    }
    print(f"{strategy} start {start}: ratio {found['ratio']:.3f}", flush=True)
    return found


def main() -> None:
    parser = options_from(NAME, __doc__, [*STRATEGIES])
    parser.add_argument("--starts", type=int, default=1, help="pairs are turns of so many starts")
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if RANK in os.environ:
        be_rank(options)
        os._exit(0)  # threads of gloo's that the interpreter meets at its end abort it now and then
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
