"""What options of the recipe bring in a step of ResNet-18: compile, channels_last, optimizers.

    python benchmarks/step_options.py [--strategy single] [--rounds 9] [--steps 12]
        [--options foreach fused] [--small]

One process a rank holds a worker for each option and lets them take turns of some steps, in an
order that turns round from one round to the next.  A ratio is eager's time a step over the
option's, of the same round.  On the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from recording import Table, options_of, spread, store, surroundings
from shardmark.launch.local.fork_server import ENVIRONMENT
from sides import GLOBAL_BATCH, add_sources_to_path, experiment_of, ranks_of, script_command

NAME = "step_options"
EAGER = "eager"
OPTIONS: Mapping[str, dict[str, Any]] = {
    EAGER: {},
    "compile: blocks": {"compile": "blocks"},
    "compile: model": {"compile": "model"},
    "channels_last": {"channels_last": True},
    "foreach": {"implementation": "foreach"},
    "fused": {"implementation": "fused"},
}
WARMUP_STEPS = 5
MOST_LOSS_DIFFERENCE = 1e-5
"""Of the first step's: this network's norms magnify rounding a hundredfold in each one after."""
BAR = f"Bar: every option's first loss is within {MOST_LOSS_DIFFERENCE:g} of eager's"
MOST_SECONDS = 3600


def measure_rank(options: argparse.Namespace) -> None:
    """One rank's part, under torchrun."""
    import torch
    import torch.distributed as dist

    from shardmark.config.load import from_mapping
    from shardmark.core.errors import StrategyUnavailable
    from shardmark.core.machine import Machine
    from shardmark.core.recipe import Recipe
    from shardmark.core.shares import Shard
    from shardmark.measure.step.compilation import Compilation
    from shardmark.measure.step.recorder import NoSpans, clock_for
    from shardmark.strategies import build_strategy
    from shardmark.strategies.base import RankContext, Server
    from shardmark.train.schedule import set_numerics
    from shardmark.workloads import build_workload
    from shardmark.workloads.base import BatchPlan

    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    context = RankContext(
        rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks, device=device
    )
    mapping = experiment_of([options.strategy], 1, 1, 0)
    mapping["workload"]["model"] = options.model
    experiment = from_mapping(mapping)
    strategy = build_strategy(options.strategy, {})
    machine = Machine(device_type="cpu", device_count=0, cores=ranks)
    plan = BatchPlan(global_batch=GLOBAL_BATCH, seed=0)
    clock = clock_for([device])

    class Option:
        """A worker, its batches, and what it has shown."""

        def __init__(self, changes: dict[str, Any]) -> None:
            self.recipe = changed(experiment.recipe, changes)
            self.refused: str | None = None
            self.seconds: list[float] = []
            try:
                strategy.check(ranks, machine, self.recipe)
            except StrategyUnavailable as error:
                self.refused = error.reason
                return
            workload = build_workload(experiment.workload, 0)
            self.batches = workload.batches(plan, Shard(index=rank, count=ranks))
            started = strategy.start(workload, self.recipe, context)
            assert not isinstance(started, Server), "its ranks all train"
            self.worker = started
            set_numerics(self.recipe)
            with Compilation() as compilation:
                losses = [float(self.take_step()) for _ in range(WARMUP_STEPS)]
            self.loss, self.compile_seconds = losses[0], compilation.seconds

        def take_step(self) -> torch.Tensor:
            return self.worker.step(next(self.batches), NoSpans())

        def take_turn(self) -> None:
            dist.barrier()
            clock.synchronize()
            started = clock.wall_seconds()
            for _ in range(options.steps):
                self.take_step()
            clock.synchronize()
            self.seconds.append((clock.wall_seconds() - started) / options.steps)

    def changed(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
        own = {key: value for key, value in changes.items() if key != "implementation"}
        if len(own) < len(changes):
            own["optimizer"] = recipe.optimizer.model_copy(update=changes)
        return recipe.model_copy(update=own)

    made = {name: Option(OPTIONS[name]) for name in (EAGER, *options.options)}
    running = [option for option in made.values() if option.refused is None]
    for number in range(options.rounds):
        for option in running if number % 2 == 0 else reversed(running):
            option.take_turn()
    told = {
        name: {"refused": option.refused}
        if option.refused is not None
        else {
            "step_seconds": option.seconds,
            "loss": option.loss,
            "compile_seconds": option.compile_seconds,
        }
        for name, option in made.items()
    }
    (options.out / f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def measured(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By option: the slowest rank's seconds a step of each round, and the first rank's loss."""
    ranks = ranks_of(options.strategy)
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    with tempfile.TemporaryDirectory() as folder:
        command = script_command(
            f"{NAME}.py",
            *("--as-rank", "--strategy", options.strategy, "--model", options.model),
            *("--rounds", str(options.rounds), "--steps", str(options.steps)),
            *("--options", *options.options),
            ranks=ranks,
            threads=threads,
            out=Path(folder),
        )
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "OMP_NUM_THREADS": str(threads)}
        variables = {**ENVIRONMENT, **os.environ, **caches, "DS_ACCELERATOR": "cpu"}
        subprocess.run(command, env=variables, check=True, timeout=MOST_SECONDS)
        told = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    slowest = told[0]
    for name, option in slowest.items():
        if "refused" not in option:
            each = zip(*(rank[name]["step_seconds"] for rank in told), strict=True)
            option["step_seconds"] = [max(of_ranks) for of_ranks in each]
            option["compile_seconds"] = max(rank[name]["compile_seconds"] for rank in told)
    return slowest


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--strategy", default="single", help="of torch's or DeepSpeed's ranks")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=12, help="of a turn")
    others = [name for name in OPTIONS if name != EAGER]
    parser.add_argument("--options", nargs="+", choices=others, default=others)
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        measure_rank(options)
        return
    add_sources_to_path()
    if options.small:
        options.rounds, options.steps = 1, 2
    around = surroundings()
    found = measured(options)
    eager, rows, holds = found[EAGER], [], True
    for name, option in found.items():
        if "refused" in option:
            rows.append((name, "refused", option["refused"], "", ""))
            continue
        pairs = zip(eager["step_seconds"], option["step_seconds"], strict=True)
        option["ratio"] = spread([of_eager / own for of_eager, own in pairs])
        holds &= abs(option["loss"] / eager["loss"] - 1) <= MOST_LOSS_DIFFERENCE
        rows.append(
            (
                name,
                f"{1000 * median(option['step_seconds']):.1f}",
                f"{option['ratio']['median']:.3f}",
                f"{option['ratio']['min']:.3f} to {option['ratio']['max']:.3f}",
                f"{option['compile_seconds']:.1f}",
            )
        )
    store(
        NAME,
        variant="" if options.strategy == "single" else options.strategy,
        options=options,
        around=around,
        bar=BAR,
        holds=holds,
        table=Table(
            columns=("option", "step, ms", "eager / option", "spread", "compile, s"),
            rows=tuple(rows),
            notes=(
                f"{options.model}, {options.strategy}, {options.rounds} rounds of {options.steps}"
                f" steps of {GLOBAL_BATCH} samples; medians.",
            ),
        ),
        numbers=found,
    )


if __name__ == "__main__":
    sys.exit(main())
