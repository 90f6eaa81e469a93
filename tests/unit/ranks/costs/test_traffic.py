"""The traffic that each strategy requires in a step, computed by hand, without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from shardmark.base.recipe import Recipe
from shardmark.base.results.schema import TrialResult
from shardmark.base.traffic import ModelSize, RequiredTraffic
from shardmark.ranks.costs import cost_model, costs_of
from shardmark.ranks.costs.base import Cell
from shardmark.ranks.strategies import STRATEGIES, build_strategy
from shardmark.ranks.strategies.ddp import DDP
from tests.golden.invented import invented_trial

SIZE = ModelSize(
    parameters=1_000_000,
    trained_parameters=1_000_000,
    divided={"in": 3_000, "out": 2_000, "rows": 1_000, "logits": 4_000, "exchanged": 6_000},
    divided_again={"in": 1_500, "out": 1_000, "exchanged": 1_000},
    between_stages_bytes=6_000,
    tied_parameters=20_000,
)
FROZEN = ModelSize(parameters=1_000_000, trained_parameters=400_000)
MB = 1e6
TWICE, BF16 = {"gradient_accumulation": 2}, {"precision": "bf16"}
AUTOCAST: dict[str, Any] = {"mixed_precision": "autocast"}
EACH_PASS: dict[str, Any] = {"reduce_each_pass": True}
SHARED_BY_TWO = {"mesh": {"shard": 2, "sequence": 2}}


def required(
    name: str, size: ModelSize, recipe: Recipe, ranks: int, nodes: int = 1, **options: Any
) -> RequiredTraffic:
    cell = Cell(size=size, recipe=recipe, world_size=ranks, nodes=nodes)
    return cost_model(build_strategy(name, options)).required_traffic(cell)


def test_the_rank_stride_is_stored_as_apart() -> None:
    """Results that were written before the rename load, and the key stays."""
    adapter = TypeAdapter(RequiredTraffic)
    traffic = required("fsdp-hybrid", SIZE, Recipe(global_batch=64, steps=1), 8, 2)
    stored = adapter.dump_python(traffic, mode="json", by_alias=True)
    assert [part["apart"] for part in stored["traffic"]] == [1, 1, 4]
    assert adapter.validate_python(stored) == traffic
    trial = invented_trial("ddp", 2, needed_traffic=traffic)
    assert '"apart":4' in trial.model_dump_json()
    assert TrialResult.model_validate_json(trial.model_dump_json()).needed_traffic == traffic


def test_every_strategy_of_the_table_has_a_cost_model() -> None:
    assert None not in [costs_of(build_strategy(name, {})) for name in STRATEGIES]


def test_a_subclass_does_not_inherit_the_cost_model_of_its_parent() -> None:
    class Changed(DDP):
        """May send something else than DDP."""

    assert costs_of(Changed()) is None


def test_a_hybrid_group_all_reduces_a_shard_across_nodes() -> None:
    traffic = required("fsdp-hybrid", SIZE, Recipe(global_batch=64, steps=1), 8, 2)
    (across,) = (part for part in traffic.traffic if part.kind == "all_reduce")
    assert across.ranks == 2
    assert across.payload_bytes == pytest.approx(MB)


@pytest.mark.parametrize(
    ("name", "ranks", "options", "changes", "megabytes"),
    [
        ("single", 1, {}, {}, 0),
        ("dp", 2, {}, {}, 0),
        ("ddp", 2, {}, {}, 4),
        ("ddp", 2, {}, TWICE, 4),
        ("fsdp", 2, {}, {}, 6),
        ("fsdp", 2, {}, TWICE, 8 + 2),  # each micro-batch gathers, the last one reduces
        ("fsdp", 2, EACH_PASS, TWICE, 8 + 4),
        ("fsdp", 2, EACH_PASS, {}, 6),
        ("fsdp-hybrid", 4, {"shard_group": 2, **EACH_PASS}, TWICE, 8 + 2 * (2 + 2)),
        ("fsdp", 2, AUTOCAST, BF16, 6),  # it keeps fp32 parameters
        ("fsdp", 2, {}, BF16, 2 + 2),
        ("fsdp", 2, {}, {"precision": "fp16"}, 6),
        ("zero-1", 2, {}, BF16, 2 + 1),
        ("fsdp-grad-op", 4, {}, {}, 6),
        ("fsdp-grad-op", 2, {}, TWICE, 4 + 2),
        ("fsdp-hybrid", 4, {"shard_group": 2}, {}, 4 + 2 + 2),  # P, G inside; G/2 across
        ("zero-0", 4, {}, {}, 6),
        ("zero-1", 4, {}, {}, 6),
        ("zero-1", 2, {}, TWICE, 2 + 2),
        ("zero-2", 2, {}, TWICE, 4 + 2),  # from stage 2 on each micro-batch is reduced
        ("zero-3", 4, {}, {}, 9),
        ("zero-3", 2, {}, TWICE, 4 + 8),
        ("zero-3", 2, {}, BF16, 2 + 2),
        ("ddp", 2, {"compress": "bf16"}, TWICE, 2),
        ("ddp", 4, {"compress": "fp16"}, BF16, 3),
        ("zro", 2, {}, {}, 4 + 2),
        ("fsdp1", 2, {}, {}, 6),
        ("fsdp1", 2, {}, TWICE, 8 + 2),
        ("fsdp1", 2, {"reshard_after_forward": False}, TWICE, 2 + 2),
        ("fsdp1", 2, {"reshard_after_forward": False, **EACH_PASS}, TWICE, 4 + 4),
        ("local-sgd", 2, {"period_steps": 8}, TWICE, 4 / 8),
        ("diloco", 4, {"period_steps": 40, "fragments": 2}, {}, 6 / 40),
        # 64 samples: 24 kB of fp32 of each, 4 more with checkpoints; half of 16 kB of logits.
        ("tp", 2, {}, {}, 64 * (28 + 8) / 1000),
        ("tp", 2, {"loss_parallel": True}, BF16, 64 * (24 - 4 + 2) / 1000),
        # Gathered, 24 and 6 again, and scattered, 24 and 4 again: half of both.
        ("tp", 2, {"sequence_parallel": True, "loss_parallel": True}, {}, 64 * 29 / 1000),
        # Half the samples, and 3 x half the gradients and parameters of a half.
        ("fsdp-tp", 4, {}, {}, 32 * (28 + 8) / 1000 + 3),
        # 64 samples of 6 kB both ways, sent by 2 ranks, which each share a tied gradient of 80 kB.
        ("pp", 2, {}, {}, 64 * 6 / 2000 + 0.08),
        # Each pipeline has half the samples, and half of the gradients on each of its ranks.
        ("ddp-pp", 4, {}, {}, 32 * 6 / 2000 + 0.08 + 2.04),
        ("fsdp-pp", 4, {}, TWICE, 32 * 6 / 2000 + 0.04 + 2 * 2.04),
        # Half of what passes between tensor ranks, a quarter of the parameters.
        ("fsdp-tp-pp", 8, {}, {}, 16 * (28 + 8) / 1000 + 32 * 6 / 2000 + 0.02 + 1.02),
        # 64 samples of 6,000 numbers both ways and 1,000 again, of which 2 ranks hand in a half
        # each and send half of that; and gradients.
        ("ulysses", 2, {}, {}, 64 * (2 * 6 + 1) * 4 / 4000 + 4),
        ("fsdp-ulysses", 4, SHARED_BY_TWO, BF16, 32 * (2 * 6 + 1) * 2 / 4000 + 3 + 3),
        ("ps-sync", 4, {}, {}, 8),
        ("ps-sync", 2, {}, TWICE, 8),
        ("ps-sync", 2, {"wire": "bf16"}, {}, 4),
        ("ps-bounded", 3, {}, {}, 8),
    ],
)
def test_required_bytes_of_a_step(
    name: str, ranks: int, options: dict[str, Any], changes: dict[str, Any], megabytes: float
) -> None:
    recipe = Recipe.model_validate({"global_batch": 64, "steps": 1, **changes})
    traffic = required(name, SIZE, recipe, ranks, **options)
    assert traffic.required_bytes == pytest.approx(megabytes * MB)


def test_frozen_parameters_have_no_gradients() -> None:
    for name, megabytes in (("ddp", 1.6), ("fsdp", 4.8), ("zero-1", 1.6)):
        traffic = required(name, FROZEN, Recipe(global_batch=64, steps=1), 2)
        assert traffic.required_bytes == pytest.approx(megabytes * MB)


def test_frozen_parameters_are_gathered_as_they_are_stored() -> None:
    """400,000 trained parameters in fp32 and 600,000 of 2 bytes, or of 4 bits."""
    for frozen_bytes in (2.0, 0.5):
        size = replace(FROZEN, frozen_element_bytes=frozen_bytes)
        traffic = required("fsdp", size, Recipe(global_batch=64, steps=1), 2, **AUTOCAST)
        assert traffic.traffic[0].payload_bytes == 2 * (1.6 * MB + frozen_bytes * 0.6 * MB) / 2
    in_bf16 = required("fsdp", FROZEN, Recipe(global_batch=64, steps=1, precision="bf16"), 2)
    assert in_bf16.traffic[0].payload_bytes == 2 * 2 * MB / 2, "cast, whatever is stored"


def test_fsdp1_reduces_the_frozen_part_of_a_flat_parameter() -> None:
    """Half of the frozen parameters are in units with trained ones."""
    size = replace(FROZEN, mixed_parameters=700_000)
    cell = Cell(size=size, recipe=Recipe(global_batch=64, steps=1), world_size=2)
    costs = cost_model(build_strategy("fsdp1", {}))
    needed, sent = costs.required_traffic(cell).traffic[1], costs.library_traffic(cell)[1]
    assert (needed.payload_bytes, sent.payload_bytes) == (1.6 * MB, 2.8 * MB)


def test_powersgd_sends_thin_matrices_and_the_rest_whole() -> None:
    """Three matrices of rank 2 or less than that; a small one and the vectors save too little."""
    matrices = ((1000, 300, 2), (1, 5000, 1), (6, 6, 4), (500, 1, 3), (1, 1, 1))
    elements = sum(rows * columns * count for rows, columns, count in matrices)
    size = ModelSize(parameters=elements, trained_parameters=elements, trained_matrices=matrices)
    options: dict[str, Any] = {"compress": "powersgd", "powersgd_rank": 2}
    traffic = required("ddp", size, Recipe(global_batch=8, steps=9), 2, **options)
    rest = 5000 + 4 * 36 + 3 * 500 + 1
    assert traffic.required_bytes == 4 * (2 * 2 * (1000 + 300) + rest)
    assert traffic.note == "the first 2 steps reduce whole gradients"


@pytest.mark.parametrize(
    ("options", "changes", "large_gathers"),
    [
        ({}, {}, 1),  # stays for the backward pass
        ({}, TWICE, 2),
        ({"max_reuse_distance": 0}, {}, 2),
        ({"max_reuse_distance": 0}, TWICE, 4),
    ],
)
def test_stage_3_sends_small_parameters_one_by_one(
    options: dict[str, Any], changes: dict[str, Any], large_gathers: int
) -> None:
    """A large matrix, and five vectors that stay whole on every rank until they are updated."""
    matrices = ((1000, 200, 1), (2000, 1, 5))
    size = ModelSize(
        parameters=210_000, trained_parameters=210_000, trained_matrices=matrices, units=3
    )
    recipe = Recipe.model_validate({"global_batch": 64, "steps": 1, **changes})
    cell = Cell(size=size, recipe=recipe, world_size=2)
    reduced, gathered, small = cost_model(build_strategy("zero-3", options)).library_traffic(cell)
    assert reduced.kind == "reduce_scatter"
    assert gathered.payload_bytes == pytest.approx(large_gathers * 4 * 200_000 / 2)
    assert (small.payload_bytes, small.calls, small.waited_for) == (4 * 10_000 / 2, 5, True)
    everything = cost_model(
        build_strategy("zero-3", {"persistence_threshold": 0, "max_reuse_distance": 0})
    )
    library_bytes = sum(part.required_bytes for part in everything.library_traffic(cell))
    assert library_bytes == pytest.approx(everything.required_traffic(cell).required_bytes)


def test_fsdp_pads_each_parameter_to_equal_shards() -> None:
    """On 8 ranks 10 rows of 3 become 16, on 2 ranks none is added; a frozen matrix is unpadded."""
    size = ModelSize(
        parameters=1_000, trained_parameters=30 + 128, trained_matrices=((10, 3, 1), (128, 1, 1))
    )
    recipe, costs = Recipe(global_batch=64, steps=1), cost_model(build_strategy("fsdp", {}))
    for ranks, added in ((2, 0), (8, 18)):
        cell = Cell(size=size, recipe=recipe, world_size=ranks)
        gathered, reduced = costs.library_traffic(cell)
        assert gathered.payload_bytes == pytest.approx(2 * 4 * (1_000 + added) / ranks)
        assert reduced.payload_bytes == pytest.approx(4 * (158 + added))
        state = costs.step_state(cell)
        assert state.optimizer_share == pytest.approx((1 + added / 158) / ranks)


def test_every_rank_of_zro_broadcasts() -> None:
    *_, broadcasts = required("zro", SIZE, Recipe(global_batch=64, steps=1), 1024).traffic
    assert (broadcasts.kind, broadcasts.calls) == ("broadcast", 1024)
