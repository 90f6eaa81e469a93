"""Predicted processor time of libraries' own code."""

from __future__ import annotations

from typing import Any

import pytest

from shardmark.base.recipe import Optimizer, Recipe
from shardmark.base.traffic import ModelSize
from shardmark.predict.hardware.catalogue import Card
from shardmark.predict.library import OPERATIONS, library_seconds, library_work
from shardmark.ranks.costs import cost_model
from shardmark.ranks.costs.base import Cell
from shardmark.ranks.strategies import STRATEGIES, build_strategy

RECIPE = Recipe(steps=1, global_batch=16)
SIZE = ModelSize(
    parameters=3000,
    trained_parameters=3000,
    trained_matrices=((10, 100, 2), (10, 1, 100)),
    divided={"in": 10, "calls": 8},
    units=4,
)
CPU = Card(
    device="cpu",
    peaks={"fp32": 1e11},
    memory_gib=16,
    memory_bytes_per_second=1e10,
    operation_seconds=1e-6,
    source="invented",
)
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in STRATEGIES),
    ("ddp", {"compress": "powersgd"}),
    ("tp", {"sequence_parallel": True}),
    *(("pp", {"schedule": schedule}) for schedule in ("gpipe", "interleaved", "zero-bubble")),
]


def work_of(name: str, recipe: Recipe = RECIPE, **options: Any) -> dict[str, float]:
    strategy = build_strategy(name, options)
    ranks = next(n for n in (1, 2, 4, 8) if strategy.unsupported_reason(n) is None)
    cell = Cell(size=SIZE, recipe=recipe, world_size=ranks)
    return dict(library_work(cost_model(strategy), cell))


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_all_that_a_strategy_names_was_measured(
    name: str, options: dict[str, Any], optimizer: str
) -> None:
    chosen = RECIPE.model_copy(
        update={"optimizer": Optimizer.model_validate({"name": optimizer, "lr": 0.1})}
    )
    assert {*work_of(name, chosen, **options)} <= {*OPERATIONS}


def test_its_time_is_that_of_so_many_operations() -> None:
    once = ("loop", "pass", "ddp", "ddp pass")
    expected = sum(OPERATIONS[name] for name in once) + 102 * OPERATIONS["adam tensor"]
    recipe = RECIPE.model_copy(update={"optimizer": Optimizer(name="adamw", lr=0.1)})
    cell = Cell(size=SIZE, recipe=recipe, world_size=2)
    seconds = library_seconds(cost_model(build_strategy("ddp", {})), cell, CPU)
    assert seconds == pytest.approx(1e-6 * expected)


def test_a_processor_runs_ahead_of_a_gpu_and_what_was_not_measured_is_not_guessed() -> None:
    for change in ({"device": None}, {"operation_seconds": None}):
        card = CPU.model_copy(update=change)
        cell = Cell(size=SIZE, recipe=RECIPE, world_size=2)
        assert library_seconds(cost_model(build_strategy("fsdp", {})), cell, card) == 0.0


def test_each_fragment_has_a_meeting_of_its_own() -> None:
    assert work_of("diloco", period_steps=20)["meeting"] == pytest.approx(1 / 20)
    assert work_of("diloco", period_steps=20, fragments=4)["meeting"] == pytest.approx(4 / 20)


def test_one_gathered_unit_costs_less_than_four() -> None:
    for name in ("fsdp", "fsdp1"):
        whole, blocks = work_of(name, wrap="root"), work_of(name)
        assert whole[f"{name} gather"] == 2
        assert blocks[f"{name} gather"] == 8


def test_stages_share_tensors_and_units_and_call_hooks_for_each_micro_batch() -> None:
    work = work_of("fsdp-pp", micro_batches=4)
    assert work["fsdp tensor"] == 102 / 2
    assert work["fsdp gather"] == 4 * 4 / 2
    assert work["1f1b pass"] == 4
    assert work["pp tensor"] == 4 * 102 / 2


def test_divided_layers_meet_in_each_pass() -> None:
    twice = RECIPE.model_copy(update={"gradient_accumulation": 2})
    assert work_of("tp", twice)["tp call"] == 2 * work_of("tp")["tp call"] == 16


def test_work_of_a_round_is_shared_by_its_steps() -> None:
    assert work_of("diloco", period_steps=20)["meeting"] == 1 / 20
    assert work_of("local-sgd", period_steps=20)["outer tensor"] == 0
