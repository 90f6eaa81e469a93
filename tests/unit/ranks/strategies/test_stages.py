"""Cuts of a model into stages, and refusals before any rank starts."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shardmark.base.errors import StrategyUnavailable
from shardmark.base.machine import Machine
from shardmark.base.recipe import Recipe
from shardmark.ranks.strategies import build_strategy
from shardmark.ranks.strategies.layers.divided import problems_with
from shardmark.ranks.strategies.layers.stages import pipeline_sends, problems_of, staged
from shardmark.ranks.workloads.base import CannotShard, TensorPlan
from tests import present
from tests.unit.ranks.train.toy import ToyWorkload

CPU = Machine(device_type="cpu", device_count=0, cores=8)


def tower(*widths: int) -> list[nn.Module]:
    return [nn.Linear(width, 1, bias=False) for width in widths]


@pytest.mark.parametrize(
    ("parts", "stages", "lengths"),
    [
        (tower(4, 4, 4, 4), 2, [2, 2]),
        (tower(1, 1, 1, 9), 2, [3, 1]),
        (tower(9, 1, 1, 1, 8, 1), 3, [1, 3, 2]),
        # An embedding is looked up, and costs nothing.
        ([nn.Embedding(1000, 4), *tower(4, 4, 4, 4)], 2, [3, 2]),
        # What has no parameters goes with what has.
        ([nn.Flatten(), *tower(4), nn.ReLU(), *tower(4), nn.ReLU()], 2, [2, 3]),
    ],
)
def test_stages_are_balanced(parts: list[nn.Module], stages: int, lengths: list[int]) -> None:
    cut = staged(parts, stages)
    assert [part for stage in cut for part in stage] == parts
    assert [len(stage) for stage in cut] == lengths


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        ([nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)], "batch norm"),
        ([nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 2)], "masks in another order"),
        ([nn.Linear(4, 4), nn.ReLU()], "1 parts with parameters do not make 2 stages"),
    ],
)
def test_models_that_a_pipeline_would_train_differently_are_refused(
    layers: list[nn.Module], told: str
) -> None:
    problem, *_ = problems_of(layers, nn.Sequential(*layers), ToyWorkload(), 2)
    assert told in problem.reason
    assert problem.remedy


class AsksForValues(nn.Module):
    """A model that reads values, as masks of transformers do unless they know of the trace."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not isinstance(inputs, FakeTensor) and bool((inputs == 0).all()):
            return inputs + 1
        return inputs


def test_sizes_between_stages_are_traced_without_values() -> None:
    parts: list[nn.Module] = [nn.Linear(4, 8), AsksForValues(), nn.Linear(8, 2)]
    workload = ToyWorkload(lambda: nn.Sequential(*parts))
    passed = pipeline_sends([parts[:2], parts[2:]], workload, ranks=2)
    assert passed["between_stages_bytes"] == 2 * 8 * 4  # there and back


def test_ranks_of_a_pipeline_are_as_uneven_as_their_stages() -> None:
    """Two stages on each of two ranks; what an embedding looks up is computed by nobody."""
    parts = [nn.Embedding(10, 4), *(nn.Linear(4, 4, bias=False) for _ in range(4))]
    workload = ToyWorkload(lambda: nn.Sequential(*parts))
    passed = pipeline_sends([parts[1:3], parts[3:4], parts[4:], parts[:1]], workload, ranks=2)
    assert passed["stage_compute_imbalance"] == 2 * 3 / 4
    assert passed["stage_parameter_imbalance"] == 2 * 56 / 104


def test_parts_that_leave_out_a_parameter_are_refused() -> None:
    layers = tower(4, 4, 4)
    model = nn.Sequential(*layers)
    assert list(problems_of(layers[:2], model, ToyWorkload(), 2)) == [
        CannotShard("its pipeline_parts leave out 2.weight", "have every parameter in a part")
    ]
    assert list(problems_of(layers, model, ToyWorkload(), 2)) == []


def test_ambiguous_plan_is_refused() -> None:
    """The order would decide, and a plan made from a set has other orders on other ranks."""
    plan = TensorPlan(styles={"0": "column", "*": "row"})
    problem, *_ = problems_with(plan, nn.Sequential(nn.Linear(4, 4)), 2)
    assert problem.reason == "its plan divides 0 as column and row"


@pytest.mark.parametrize(
    ("name", "ranks", "options", "changes", "told"),
    [
        ("pp", 2, {}, {"precision": "fp16"}, "set recipe.precision: bf16"),
        ("pp", 2, {"micro_batches": 5}, {}, "24 samples of a pass cannot be split into 5"),
        ("pp", 4, {"micro_batches": 2}, {}, "set micro_batches to 4 or more"),
        ("pp", 4, {"micro_batches": 6, "schedule": "interleaved"}, {}, "a multiple of 4"),
        ("pp", 2, {}, {"gradient_accumulation": 4}, "6 samples of a pass"),
        ("pp", 2, {}, {"compile": "blocks"}, "set recipe.compile to none"),
        ("ddp-pp", 4, {"schedule": "zero-bubble"}, {}, "fsdp-pp"),
        ("pp", 2, {"schedule": "gpipe", "micro_batches": 1}, {}, None),
        ("fsdp-pp", 4, {}, {}, None),
    ],
)
def test_recipes_that_a_pipeline_cannot_run_are_refused(
    name: str, ranks: int, options: dict[str, Any], changes: dict[str, Any], told: str | None
) -> None:
    recipe = Recipe.model_validate({"global_batch": 24, "steps": 1} | changes)
    strategy = build_strategy(name, options)
    if told is None:
        strategy.check(ranks, CPU, recipe)
        return
    with pytest.raises(StrategyUnavailable, match=told):
        strategy.check(ranks, CPU, recipe)


@pytest.mark.parametrize(
    ("name", "mesh", "told"),
    [
        ("ddp-pp", {"data": 2, "pipeline": 4}, "has 8 ranks, not 4"),
        ("ddp-pp", {"data": 4}, "needs 2 or more for data and for pipeline"),
        ("ddp-pp", {"shard": 2, "pipeline": 2}, "an axis that ddp-pp does not have"),
        ("fsdp-pp", {"tensor": 2, "pipeline": 2}, "leave out tensor, or use fsdp-tp-pp"),
        ("fsdp-tp-pp", {"tensor": 3}, "use sizes whose product is 4, or world_size 3"),
        ("fsdp-tp-pp", {"sequence": 2, "tensor": 2}, "an axis that fsdp-tp-pp does not have"),
        ("ulysses", {"shard": 2, "sequence": 2}, "an axis that ulysses does not have"),
        ("fsdp-ulysses", {"shard": 4}, "needs 2 or more for sequence"),
    ],
)
def test_impossible_meshes_are_refused(name: str, mesh: dict[str, int], told: str) -> None:
    reason = present(build_strategy(name, {"mesh": mesh}).unsupported_reason(4))
    assert told in reason


def test_tensor_ranks_are_neighbours_inside_a_node() -> None:
    """The rule is the default; a mesh may have groups of whole nodes, but none in part."""
    both = build_strategy("fsdp-tp-pp", {})
    assert both.unsupported_reason(8, nodes=4) is None
    layout = both.layout(8, nodes=4)
    assert [(rank.node, rank.share and rank.share.index) for rank in layout.ranks] == [
        *((0, 0), (0, 0), (1, 0), (1, 0), (2, 1), (2, 1), (3, 1), (3, 1))
    ]
    assert [n for n, rank in enumerate(layout.ranks) if rank.counts_loss] == [2, 6]
    assert build_strategy("fsdp-tp", {}).layout(8, nodes=2).tensor == 4
    across = build_strategy("fsdp-tp-pp", {"mesh": {"tensor": 4, "pipeline": 3}})
    assert across.unsupported_reason(12, nodes=6) is None
    reason = present(across.unsupported_reason(12, nodes=2))
    assert "use a size of tensor that divides 6" in reason
