"""Whether the strategies train the same thing: parameters after 5 SGD steps in fp32.

    python benchmarks/same_mathematics.py [--batch 32 64] [--model resnet18] [--small]

Every strategy on 2 ranks (`fsdp-hybrid` on 4, with `ddp` beside it) on digits with momentum,
against a single process that plays all ranks in turn (`shardmark.equivalence.reference`).  The
deviation is the 2-norm of the difference over the 2-norm of the reference: of all parameters as one
vector, and of the tensor that differs most.

Two controls.  `moved` is how far training went, in the same measure: a deviation far below it is an
agreement, not two models that stood still.  `rounding` is the deviation of a second reference that
plays the ranks in reverse order: the same mathematics, other rounding.  With four summands the
order matters, with two it does not; nothing can be expected to agree better than that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from groups import run_ranks
from recording import Table, options_of, store, surroundings
from shardmark.core.recipe import Recipe
from shardmark.core.shares import Shard, StepShard
from shardmark.equivalence.reference import Reference
from shardmark.measure.step.recorder import NoSpans
from shardmark.strategies import build_strategy
from shardmark.strategies.base import RankContext, Server
from shardmark.train.schedule import step_seed
from shardmark.workloads import build_workload
from shardmark.workloads.base import BatchPlan
from shardmark.workloads.model_building import seed_generators
from shardmark.workloads.vision.options import ClassificationOptions
from sides import add_sources_to_path

NAME = "same_mathematics"
MOST_DEVIATION = 1e-5
MOST_ROUNDINGS = 4
BAR = (
    f"Bar: all parameters within {MOST_DEVIATION:g} of the reference for every strategy; "
    f"on 4 ranks that, or within {MOST_ROUNDINGS} times what the order of summation alone changes"
)
STRATEGIES = {
    2: ("ddp", "fsdp", "fsdp-grad-op", "zero-0", "zero-1", "zero-2", "zero-3"),
    4: ("ddp", "fsdp-hybrid"),
}
"""Ranks -> strategies; `single` and `dp` are one process."""
STEPS = 5
GROUP_SECONDS = 900


def recipe_of(batch: int) -> Recipe:
    return Recipe.model_validate(
        {
            "global_batch": batch,
            "steps": STEPS,
            "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
            "seed": 0,
        }
    )


def workload_of(model: str) -> Any:
    return build_workload(ClassificationOptions(model=model), seed=0)


Parameters = dict[str, Tensor]


def train(process: RankContext, name: str, model: str, batch: int) -> list[Parameters]:
    """The strategy's parameters, whole: initial ones, then after each step."""
    recipe, workload = recipe_of(batch), workload_of(model)
    worker = build_strategy(name, {}).start(workload, recipe, process)
    assert not isinstance(worker, Server)
    plan = BatchPlan(global_batch=batch, seed=recipe.seed)
    shard = Shard(index=process.rank, count=process.world_size)
    batches = workload.batches(plan, shard)
    states = [worker.full_parameters()]
    for step in range(STEPS):
        seed = step_seed(recipe.seed, StepShard(step=step, shard=shard))
        seed_generators(seed, on_gpu=process.device.type == "cuda")
        worker.step(next(batches), NoSpans())
        states.append(worker.full_parameters())
    return states


def train_all(
    process: RankContext, names: tuple[str, ...], model: str, batches: list[int]
) -> dict[tuple[str, int], list[Parameters]]:
    found = {(n, b): train(process, n, model, b) for b in batches for n in names}
    return found if process.rank == 0 else {}


def reference(ranks: int, model: str, batch: int, *, backwards: bool = False) -> list[Parameters]:
    """Initial parameters, then those after each step."""
    recipe = recipe_of(batch)
    alone = Reference(
        workload_of(model),
        recipe,
        shares=ranks,
        plan=BatchPlan(global_batch=batch, seed=recipe.seed),
        total_steps=STEPS,
    )
    if backwards:  # each list has one entry a rank
        for of_ranks in (alone._batches, alone._shards, alone._buffers):
            of_ranks.reverse()
    states = [alone.full_parameters()]
    for _ in range(STEPS):
        alone.step()
        states.append(alone.full_parameters())
    return states


def deviation(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Any]:
    assert found.keys() == wanted.keys()
    of_tensors = {}
    squared_difference = squared_norm = 0.0
    for name, tensor in wanted.items():
        difference = float((found[name].double() - tensor.double()).norm())
        norm = float(tensor.double().norm())
        squared_difference += difference**2
        squared_norm += norm**2
        # A bias that starts at zero has only its few steps to be compared with.
        of_tensors[name] = difference / norm if norm else math.inf if difference else 0.0
    largest = max(of_tensors, key=lambda name: of_tensors[name])
    return {
        "all": math.sqrt(squared_difference / squared_norm),
        "largest_tensor": of_tensors[largest],
        "largest_tensor_name": largest,
    }


def compare(found: list[Parameters], wanted: list[Parameters]) -> dict[str, Any]:
    assert all(torch.equal(found[0][name], tensor) for name, tensor in wanted[0].items())
    by_step = [deviation(f, w)["all"] for f, w in zip(found[1:], wanted[1:], strict=True)]
    return deviation(found[-1], wanted[-1]) | {"all_by_step": by_step}


def measure(model: str, batches: list[int]) -> list[dict[str, Any]]:
    rows = []
    for ranks, names in STRATEGIES.items():
        found = run_ranks(train_all, names, model, batches, ranks=ranks, seconds=GROUP_SECONDS)[0]
        for batch in batches:
            wanted = reference(ranks, model, batch)
            controls = {
                "moved": deviation(wanted[0], wanted[-1])["all"],
                "rounding": compare(reference(ranks, model, batch, backwards=True), wanted)["all"],
            }
            for name in names:
                row = {"strategy": name, "ranks": ranks, "global_batch": batch, **controls}
                rows.append(row | compare(found[name, batch], wanted))
    return rows


def is_same(row: Mapping[str, Any]) -> bool:
    allowed = MOST_DEVIATION
    if row["ranks"] > 2:
        allowed = max(allowed, MOST_ROUNDINGS * row["rounding"])
    return bool(row["all"] <= allowed)


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--model", default="resnet18")
    options = parser.parse_args()
    add_sources_to_path()
    around = surroundings()
    torch.set_num_threads(1)  # as in the ranks: other threads add up in another order
    rows = measure(options.model, options.batch[:1] if options.small else options.batch)
    table = Table(
        columns=(
            *("strategy", "ranks", "global batch", "all parameters", "largest tensor"),
            *("which", "after step 1", "rounding", "moved"),
        ),
        rows=tuple(
            (
                row["strategy"],
                str(row["ranks"]),
                str(row["global_batch"]),
                *(f"{row[key]:.1e}" for key in ("all", "largest_tensor")),
                row["largest_tensor_name"] if row["largest_tensor"] else "-",
                *(f"{x:.1e}" for x in (row["all_by_step"][0], row["rounding"], row["moved"])),
            )
            for row in rows
        ),
    )
    store(
        NAME,
        options=options,
        around=around,
        bar=BAR,
        holds=all(map(is_same, rows)),
        table=table,
        numbers={"model": options.model, "steps": STEPS, "rows": rows},
    )


if __name__ == "__main__":
    main()
