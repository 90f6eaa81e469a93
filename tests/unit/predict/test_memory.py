"""Predicted memory of invented models, by hand."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardmark.base.recipe import Recipe
from shardmark.base.traffic import ModelSize
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.matrix import cells_of_any_size
from shardmark.predict.hardware.catalogue import Card, load_card
from shardmark.predict.memory import (
    LEAST,
    MOST,
    USUAL,
    RankMemory,
    fit_of,
    memory_column,
    needed_bytes,
    rank_memory,
)
from shardmark.predict.models import Models
from shardmark.predict.profile import Amount, Moment, Profile, Unit
from shardmark.ranks import workloads
from shardmark.ranks.costs import cost_model
from shardmark.ranks.costs.base import Cell, StepState
from shardmark.ranks.costs.zero_buckets import BucketState, reduced_in_buckets
from shardmark.ranks.strategies import build_strategy
from shardmark.ranks.workloads import build_workload
from shardmark.ranks.workloads.base import Workload
from shardmark.ranks.workloads.vision.options import ClassificationOptions

PARAMETERS = 200_000
"""Parameters of each block: more than DeepSpeed keeps whole."""
BLOCKS = 3
STATE = 4 * PARAMETERS
"""Bytes of one block's parameters."""
WHOLE = BLOCKS * STATE


def recipe(**changes: Any) -> Recipe:
    return Recipe.model_validate(
        {"per_rank_batch": 2, "steps": 1, "optimizer": {"name": "adam"}, **changes}
    )


def invented(per_sample: float = 0.0) -> Profile:
    """Each block keeps so much of a sample; its gradients come one after the other."""
    units = tuple(
        Unit(
            name=str(number),
            parameters=PARAMETERS,
            trained_parameters=PARAMETERS,
            sizes=(PARAMETERS,),
            forward=(),
            backward=(),
            saved_bytes=Amount(per_sample=per_sample),
            forward_moments=(Moment(bytes=Amount(per_sample=(number + 1) * per_sample)),),
            backward_moments=(
                Moment(bytes=Amount(fixed=STATE, per_sample=(number + 1) * per_sample)),
            ),
            gradient_moments=(
                Moment(bytes=Amount(fixed=STATE, per_sample=(number + 1) * per_sample)),
            ),
            reduced_bytes=Amount(per_sample=number * per_sample),
        )
        for number in range(BLOCKS)
    )
    size = ModelSize(parameters=BLOCKS * PARAMETERS, trained_parameters=BLOCKS * PARAMETERS)
    return Profile(units=units, size=size, state_values=2, update_values=1)


@pytest.mark.parametrize(
    ("optimizer", "changes", "bytes_each"),
    [
        ({"name": "sgd"}, {}, 8),
        ({"name": "sgd", "momentum": 0.9}, {}, 12),
        ({"name": "adamw"}, {}, 16),
        ({"name": "adamw", "state_bits": 8}, {}, 10),
        ({"name": "adamw"}, {"weights": "bf16", "precision": "bf16"}, 8),
        ({"name": "adafactor"}, {}, 8),
        ({"name": "muon"}, {}, 12),  # AdamW's two averages for the embedding alone
        ({"name": "own", "path": "torch.optim:RMSprop"}, {}, 12),
        ({"name": "adamw"}, {"cpu_offload": True}, 0),
    ],
)
def test_state_that_exceeds_all_devices_is_that_of_the_optimizer(
    optimizer: dict[str, Any], changes: dict[str, Any], bytes_each: float
) -> None:
    """Weights and gradients of 4 bytes, or 2, and what the optimizer stores."""
    experiment = Experiment.model_validate(
        {
            "name": "small",
            "workload": {
                **{"name": "language", "model": "gpt", "layers": 4, "width": 256},
                **{"dataset": "random", "vocabulary": 64, "sequence_length": 16},
            },
            "recipe": recipe(optimizer=optimizer, **changes).model_dump(mode="json"),
            "matrix": {"strategy": ["single"], "world_size": [1]},
        }
    )
    (cell,), _ = cells_of_any_size(experiment)
    models = Models()
    parameters = 4 * 12 * 256**2

    assert models.state_exceeds(cell, 0.9 * bytes_each * parameters) == bool(bytes_each)
    assert not models.state_exceeds(cell, 1.1 * bytes_each * parameters)


def held(
    name: str,
    ranks: int = 4,
    profile: Profile | None = None,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> RankMemory:
    strategy = build_strategy(name, options or {})
    return rank_memory(profile or invented(), strategy, recipe(**changes), ranks)


@pytest.mark.parametrize("name", ["single", "ddp", "zro", "fsdp", "fsdp1", "zero-1", "zero-3"])
def test_bf16_weights_have_half_the_state(name: str) -> None:
    """Weights, gradients and copies are halved; the trace counts the optimizer's own state."""
    own = replace(invented(), state_values=0)
    of_fp32 = held(name, 2, own)
    of_bf16 = held(name, 2, own, weights="bf16")
    for part in ("parameters", "gradients", "optimizer_state"):
        assert getattr(of_bf16, part) == getattr(of_fp32, part) / 2
    assert of_bf16.parameters > 0


def test_gradients_and_activations_are_not_added_up_where_they_do_not_meet() -> None:
    """At the first gradient all activations are there; at the last one all gradients."""
    many = held("single", 1, invented(per_sample=1e6))
    assert many.activations == 2 * BLOCKS * 1e6
    assert (many.gradients, many.temporary) == (0, STATE)
    few = held("single", 1)
    assert (few.gradients + few.temporary, few.activations) == (WHOLE + STATE, 0)
    assert few.peak_bytes == 3 * WHOLE + WHOLE + STATE


def test_the_update_may_be_the_fullest_moment() -> None:
    found = held("single", 1, replace(invented(), update_values=3, updates_together=True))
    assert (found.gradients, found.temporary) == (WHOLE, 3 * WHOLE)


def test_buckets_hold_all_gradients_from_the_start() -> None:
    found = held("ddp", profile=invented(per_sample=1e6))
    assert (found.gradients, found.temporary) == (WHOLE, STATE)
    assert found.activations == 2 * BLOCKS * 1e6


def test_shards_beside_the_units_that_are_whole() -> None:
    """The middle of the pass has a unit and two messages: the next unit and the last gradients."""
    found = held("fsdp", profile=invented(per_sample=1e6))
    assert (found.parameters, found.optimizer_state) == (WHOLE / 4, 2 * WHOLE / 4)
    assert found.gathered == 2 * STATE
    kept = held("fsdp-grad-op", profile=invented(per_sample=1e6))
    assert kept.gathered == WHOLE + STATE  # the last forward pass, with its message
    hybrid = held("fsdp-hybrid", profile=invented(per_sample=1e6))
    assert hybrid.parameters == WHOLE / 2


@pytest.mark.parametrize(("ranks", "share"), [(2, 2 / 3), (4, 1 / 3)])
def test_an_optimizer_of_whole_parameters_is_as_large_as_its_fullest_rank(
    ranks: int, share: float
) -> None:
    """Three equal ones over two ranks, or over more than there are."""
    found, replicas = held("zro", ranks), held("ddp", ranks)
    assert found.optimizer_state == pytest.approx(share * 2 * WHOLE)
    assert (found.parameters, found.gradients) == (replicas.parameters, replicas.gradients)


def test_tensor_ranks_hold_what_no_layer_divides() -> None:
    """Layers do not divide a fifth of each block's parameters, and a quarter of its activations."""
    units = tuple(
        replace(
            unit,
            replicated_fraction=1 / 5,
            saved_bytes=replace(unit.saved_bytes, replicated_fraction=1 / 4),
            backward_moments=tuple(
                replace(at, bytes=replace(at.bytes, replicated_fraction=1 / 4))
                for at in unit.backward_moments
            ),
        )
        for unit in invented(per_sample=1e7).units
    )
    found = held("tp", 4, replace(invented(), units=units))
    part = 1 / 5 + 4 / 5 / 4
    assert found.parameters == pytest.approx(part * WHOLE)
    assert found.optimizer_state == pytest.approx(2 * part * WHOLE)
    assert found.activations == pytest.approx((1 / 4 + 3 / 4 / 4) * 2 * BLOCKS * 1e7)


def test_parts_of_sequences_leave_gradients_in_buckets() -> None:
    profile = invented(per_sample=1e6)
    found, replicas = held("ulysses", profile=profile), held("ddp", profile=profile)
    assert (found.gradients, found.parameters) == (replicas.gradients, replicas.parameters)
    assert found.activations == replicas.activations / 4
    sharded, shards = held("fsdp-ulysses"), held("fsdp")
    assert (sharded.gathered, sharded.parameters) == (shards.gathered, shards.parameters)


def test_a_server_has_the_optimizer_and_a_worker_flat_gradients() -> None:
    found = held("ps-sync", profile=invented(per_sample=1e6))
    assert (found.parameters, found.gradients, found.optimizer_state) == (WHOLE, WHOLE, 0)
    casts = rank_memory(
        invented(), build_strategy("ps-sync", {"wire": "bf16"}), recipe(), 4, device_type="cpu"
    )
    assert casts.buffers == 2 * WHOLE / 2  # both ways


@pytest.mark.parametrize(
    ("options", "momentum", "meeting"),
    [
        ({}, 1, 2),
        ({"fragments": 2}, 1, 1),
        ({"outer_momentum": 0.0}, 0, 2),
    ],
)
def test_an_outer_optimizer_comes_on_top(
    options: dict[str, Any], momentum: int, meeting: int
) -> None:
    """The meeting of the ranks is the fullest moment where activations are few."""
    found = held("diloco", options=options)
    assert found.parameters == 2 * WHOLE
    assert found.optimizer_state == (2 + momentum) * WHOLE
    assert found.gradients + found.temporary == meeting * WHOLE + STATE
    assert held("local-sgd").peak_bytes == held("single").peak_bytes


def test_replicas_of_a_pipeline_have_buckets_beside_their_sums() -> None:
    profile = replace(invented(per_sample=1e6), batch_bytes=Amount())
    assert held("ddp-pp", 4, profile, per_rank_batch=8).gradients == 2 * WHOLE / 2
    assert held("fsdp-pp", 4, profile, per_rank_batch=8).gradients == WHOLE / 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_adds_masters_and_a_bucket(stage: int) -> None:
    found = held(f"zero-{stage}", profile=invented(per_sample=1e6))
    assert found.parameters == (WHOLE / 4 if stage == 3 else WHOLE)
    assert found.optimizer_state == 3 * WHOLE / 4
    buckets = 1 if stage == 3 else 2  # which overlap on a GPU
    gathered = 2 * WHOLE if stage == 3 else 0  # the message, and what is copied from it
    assert found.gathered + found.buffers == gathered + buckets * 25 * 2**20


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_in_16_bits_the_bucket_of_stage_3_alone_is_in_fp32(stage: int) -> None:
    found = held(f"zero-{stage}", profile=invented(per_sample=1e6), precision="bf16")
    gathered, buckets = (WHOLE, 25.0) if stage == 3 else (0, 2 * 12.5)
    assert found.gathered + found.buffers == gathered + buckets * 2**20


@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp-grad-op", "fsdp-hybrid", "zero-2", "zero-3"])
def test_more_ranks_never_hold_more(name: str) -> None:
    peaks = [held(name, ranks, invented(1e3)).peak_bytes for ranks in (4, 8, 16, 64)]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero-1", "zero-2", "zero-3"])
def test_micro_batches_share_activations_and_add_gradients(name: str) -> None:
    profile = replace(invented(1e6), batch_bytes=Amount(per_sample=10))
    whole = held(name, profile=profile)
    parts = held(name, profile=profile, gradient_accumulation=2)
    assert parts.activations == pytest.approx(whole.activations / 2, rel=1e-4)
    assert parts.gradients >= whole.gradients


@pytest.mark.parametrize(
    ("name", "passes_before"), [("single", 1), ("ddp", 2), ("zero-1", 1), ("zero-2", 1 / 3)]
)
def test_the_last_pass_begins_with_gradients_of_those_before(
    name: str, passes_before: float
) -> None:
    """DDP's are not in its buckets yet; ZeRO-2 keeps a block that a rank has any part of."""
    one = 1 if name == "single" else BLOCKS
    found = held(name, one, invented(per_sample=1e6), gradient_accumulation=2)
    assert found.gradients == passes_before * WHOLE
    assert found.activations == BLOCKS * 1e6


@pytest.mark.parametrize("name", ["fsdp", "fsdp-grad-op", "fsdp1"])
def test_a_reduction_in_each_pass_leaves_shards_to_the_next(name: str) -> None:
    """Without it, full gradients of blocks whose last ones are not reduced yet."""
    once = held(name, gradient_accumulation=2)
    assert once.gradients in (WHOLE, WHOLE - 3 / 4 * STATE)
    each = held(name, options={"reduce_each_pass": True}, gradient_accumulation=2)
    assert each.gradients == WHOLE / 4
    assert each.peak_bytes < once.peak_bytes
    offloaded = held(
        name, options={"reduce_each_pass": True}, gradient_accumulation=2, cpu_offload=True
    )
    assert offloaded.gradients == 0


@pytest.mark.parametrize(
    ("schedule", "live"),
    [("1f1b", 4 / 8), ("gpipe", 1.0), ("interleaved", 11 / 16), ("zero-bubble", 12 / 16)],
)
def test_a_pipeline_keeps_micro_batches_in_flight(schedule: str, live: float) -> None:
    """Eight of four ranks; gradients of the first are there when the last ones come.

    Zero bubble puts off weights of four, of two stages on each rank.
    """
    profile = replace(invented(per_sample=1e6), batch_bytes=Amount())
    strategy = build_strategy("pp", {"schedule": schedule})
    found = rank_memory(profile, strategy, recipe(per_rank_batch=8), 4)
    assert found.activations == pytest.approx(live * 8 * BLOCKS * 1e6 / 4)
    assert found.gradients == WHOLE / 4


def units_of(*units: tuple[int, ...]) -> list[Unit]:
    return [
        Unit(
            name=str(number),
            parameters=sum(sizes),
            trained_parameters=sum(sizes),
            sizes=sizes,
            forward=(),
            backward=(),
        )
        for number, sizes in enumerate(units)
    ]


@pytest.mark.parametrize(
    ("units", "bucket", "ranks", "expected"),
    [
        # All of it has room in one bucket, which is reduced when the pass is over.
        ([(6,), (6,)], 12, 2, [BucketState(), BucketState()]),
        # Two are reduced when the third comes.  They are one rank's, which keeps them as they lie.
        (
            [(6,), (6,), (6,), (6,)],
            12,
            2,
            [BucketState(), BucketState(12, 0, 12), BucketState(), BucketState()],
        ),
        # They are two ranks', and flattened anew.
        (
            [(6,), (6,), (6,), (6,)],
            12,
            4,
            [BucketState(), BucketState(6, 6, 6), BucketState(), BucketState()],
        ),
        # The same parameters in two units.
        ([(6, 6), (6, 6)], 12, 4, [BucketState(6, 6, 6), BucketState()]),
        # A large one waits for the next; both ranks keep it whole, one keeps the others, too.
        ([(4,), (4,), (20,)], 8, 2, [BucketState(), BucketState(20 + 28, 0, 28), BucketState()]),
    ],
)
def test_stage_2_reduces_full_buckets(
    units: list[tuple[int, ...]], bucket: int, ranks: int, expected: list[BucketState]
) -> None:
    """During a unit, more while copied, kept from then on."""
    assert reduced_in_buckets(units_of(*units), bucket, ranks) == expected
    offloaded = reduced_in_buckets(units_of(*units), bucket, ranks, retains=False)
    assert not any(each.retained for each in offloaded)


@pytest.mark.parametrize("name", ["fsdp", "fsdp-grad-op", "zero-1", "zero-2", "zero-3"])
def test_what_is_offloaded_is_on_the_host_alone(name: str) -> None:
    profile = invented(per_sample=1e6)
    here, there = (held(name, profile=profile, cpu_offload=offload) for offload in (False, True))
    computed_with = name.startswith("zero") and name != "zero-3"  # whole parameters, all the time
    assert there.parameters == (WHOLE if computed_with else 0)
    assert there.optimizer_state == 0
    own, adam = WHOLE / 4, 2 * WHOLE / 4
    masters = own if name.startswith("zero") else 0
    assert there.on_host == own + own + masters + adam  # parameters and gradients, masters
    assert here.on_host == 0
    kept = here.gathered + here.buffers
    in_leaving = STATE if computed_with else 0
    assert there.gathered + there.buffers == kept + in_leaving
    assert there.peak_bytes < here.peak_bytes


def test_offloaded_gradients_leave_as_they_come() -> None:
    """At the last gradient the others are gone; in stage 1 those of other ranks stay."""
    assert held("fsdp", cpu_offload=True).gradients == 0
    assert held("zero-2", cpu_offload=True).gradients == 0
    kept = 3 / 4 * (BLOCKS - 1) * STATE
    assert held("zero-1", cpu_offload=True).gradients == pytest.approx(kept)


def test_a_data_set_is_in_a_cpus_memory() -> None:
    assert held("ddp", profile=replace(invented(), data_bytes=7e6)).buffers == 7e6
    assert needed_bytes(7e6, "cpu") == 7e6


@pytest.mark.parametrize("samples", [16, 32])
def test_data_are_counted_as_the_workload_holds_them(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, more = (
        ClassificationOptions(
            name="classification", dataset="random", image_size=32, training_samples=count
        )
        for count in (samples, 2 * samples)
    )

    def collect_and_build(*arguments: Any) -> Workload:
        gc.collect()
        return build_workload(*arguments)

    monkeypatch.setattr(workloads, "build_workload", collect_and_build)
    garbage: list[object] = [torch.ones(360)]
    garbage.append(garbage)  # a cycle, which the collector frees between the two counts
    del garbage
    held_by = [Models()._data_bytes(options, recipe()) for options in (few, more)]
    assert held_by[1] - held_by[0] == samples * (3 * 32 * 32 + 8)  # bytes, and a label of 64 bits


def test_a_device_holds_more_than_tensors() -> None:
    found = held("single", 1)
    needed = [needed_bytes(found.peak_bytes, "cuda", each) for each in (LEAST, USUAL, MOST)]
    assert needed == sorted(needed)
    assert found.device_bytes("cuda") == needed[1]
    assert needed[0] > found.peak_bytes


@pytest.mark.parametrize(
    ("card", "tensors_gib", "fit"),
    [
        # Published runs that ended, of the size that was traced: they are never "no".
        ("rtx-3090", 21.35, "tight"),  # wide_resnet50_2, 384 pictures in fp16, timm
        ("rtx-3090", 14.32, "yes"),  # resnet26, 512 pictures, timm
        ("v100-16", 13.75, "tight"),  # GPT-2 of 2.9 billion parameters, fully sharded over 4
        ("a100-80", 43.1, "yes"),  # ConvNeXt-Large in fp32, 128 pictures, milabench
        ("a100-40", 59.5, "no"),
        ("h100", 78.0, "no"),  # the tensors fit, the context does not
    ],
)
def test_what_fits_depends_on_the_allocator_near_the_end(
    card: str, tensors_gib: float, fit: str
) -> None:
    assert fit_of(tensors_gib * 2**30, load_card(card)) == fit


def test_a_cpu_needs_its_tensors_alone() -> None:
    cpu = Card(device="cpu", memory_gib=2, memory_bytes_per_second=1e9, source="invented")
    assert [fit_of(size * 2**30, cpu) for size in (2, 2.01)] == ["yes", "no"]


@pytest.mark.parametrize(("blocks", "live"), [(1, 1), (2, 2), (10, BLOCKS)])
def test_live_parameters_of_stage_3_are_gathered_beside_as_many_in_messages(
    blocks: int, live: int
) -> None:
    options = {"max_live_parameters": blocks * PARAMETERS, "max_reuse_distance": 0}
    assert held("zero-3", options=options).gathered == 2 * live * STATE


def test_the_fullest_stage_of_a_pipeline_holds_more_activations() -> None:
    cell: Any = SimpleNamespace(
        recipe=recipe(),
        samples=lambda _: 2.0,
        size=ModelSize(
            parameters=1,
            trained_parameters=1,
            stage_compute_imbalance=1.6,
            stage_parameter_imbalance=1.2,
        ),
    )
    layout: Any = SimpleNamespace(shares=1, tensor=1, sequence=1, pipeline=4)
    column = memory_column(cell, layout, StepState(parameters=0.0, units=()), in_flight=1.0)
    assert column.slices == pytest.approx(4 / 1.6)  # a stage has 1.6 times the average


@pytest.mark.parametrize(("wrap", "retained"), [("blocks", STATE / 4), ("root", STATE)])
def test_units_that_are_not_sharded_alone_retain_full_gradients(wrap: str, retained: float) -> None:
    profile = replace(invented(), units=tuple(replace(u, block=True) for u in invented().units))
    cell = Cell(
        size=profile.size, recipe=recipe(), world_size=4, units=profile.units, device_type="cuda"
    )
    state = cost_model(build_strategy("fsdp", {"wrap": wrap})).step_state(cell)
    assert [unit.retained_gradients for unit in state.units] == [retained] * BLOCKS


@pytest.mark.parametrize(("passes", "retained"), [(1, STATE), (2, 0.0)])
def test_a_gradient_that_exists_before_the_last_pass_is_counted_once(
    passes: int, retained: float
) -> None:
    units, changed = invented().units, recipe(gradient_accumulation=passes)
    cell = Cell(size=invented().size, recipe=changed, world_size=1, units=units)
    state = cost_model(build_strategy("single", {})).step_state(cell)
    assert [unit.retained_gradients for unit in state.units] == [retained] * BLOCKS
    assert state.gradients == WHOLE - BLOCKS * retained


@pytest.mark.parametrize(("name", "returned"), [("zero-1", WHOLE / 4), ("zero-3", 0.0)])
def test_parameters_that_are_updated_on_the_host_return_to_a_device_that_stores_them(
    name: str, returned: float
) -> None:
    units, changed = invented().units, recipe(cpu_offload=True)
    cell = Cell(size=invented().size, recipe=changed, world_size=4, units=units)
    state = cost_model(build_strategy(name, {})).step_state(cell)
    assert state.host is not None
    assert state.host.returned == returned
