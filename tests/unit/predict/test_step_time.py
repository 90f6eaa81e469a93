"""Predicted times, by cases that can be computed by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import hypot, log, sqrt
from typing import Any, get_args

import pytest

from shardmark.base.errors import InputError
from shardmark.base.recipe import Optimizer, Precision, Recipe
from shardmark.base.traffic import ModelSize, RequiredTraffic, Traffic
from shardmark.predict.anchor import calibrate_communication, calibrate_compute
from shardmark.predict.hardware.catalogue import Card, Node, NodeType, Timed, load_node
from shardmark.predict.intervals import RESIDUALS
from shardmark.predict.library import OPERATIONS, library_seconds, library_work
from shardmark.predict.profile import Amount, Kind, Operation, Profile, Unit
from shardmark.predict.step import Factors, Step, distribution_tax, plan_step, two_streams
from shardmark.predict.timing import Constants, collective_seconds, operation_seconds
from shardmark.ranks.costs import cost_model
from shardmark.ranks.costs.base import Cell, Costs
from shardmark.ranks.costs.replicas import DDPCosts
from shardmark.ranks.strategies import STRATEGIES, build_strategy
from shardmark.ranks.strategies.base import Strategy
from tests.unit.predict.made import made_profile

PLAIN = Constants(
    core_share=1,
    core_convolution_share=1,
    product_share=1,
    attention_share=1,
    convolution_share=1,
    grouped_share=1,
    depthwise_share=1,
    depthwise_accesses=1,
    operand_rate=float("inf"),
    winograd_factor=1,
    transposed_accesses=0,
    memory_share=1,
    call_seconds=0,
    tile_seconds=0,
    launch_seconds=0,
    replica_seconds=0,
    sample_seconds=0,
    staged_share=1,
    link_share=1,
    network_share=1,
    link_seconds=0,
    network_seconds=0,
    interference=0,
    distribution=0,
    spread=0,
)
"""A world in which data sheets are true."""
CARD = Card(
    peaks={"fp32": 1e12, "fp16": 4e12},
    memory_gib=16,
    memory_bytes_per_second=1e12,
    link_bytes_per_second=100e9,
    source="invented",
)
NODE = NodeType(card=CARD, node=Node(card="invented", devices=4, network_bytes_per_second=10e9))
GRADIENT_BYTES = 1e9
UNITS = 4


def profile() -> Profile:
    """A forward pass of one second a sample, a backward pass of two, 1 GB of gradients."""
    made = made_profile(units=UNITS, million_parameters=GRADIENT_BYTES / 4e6, gigaflops=250)
    return replace(made, state_values=1, update_accesses=8)


def node_with(**card: Any) -> NodeType:
    """The node with another card."""
    return NODE.model_copy(update={"card": CARD.model_copy(update=card)})


def step_of(
    strategy: str | Strategy,
    ranks: int,
    options: dict[str, Any] | None = None,
    *,
    model: Profile | None = None,
    node: NodeType = NODE,
    constants: Constants = PLAIN,
    **recipe: Any,
) -> Step:
    return plan_step(
        model or profile(),
        build_strategy(strategy, options or {}) if isinstance(strategy, str) else strategy,
        Recipe(**{"steps": 1, "per_rank_batch": 2, **recipe}),
        ranks,
        node,
        nodes=max(1, ranks // 4),
        constants=constants,
    )


def test_bf16_weights_send_half_and_update_from_half() -> None:
    """The trace counts the optimizer's own state, here 4 bytes: 3 of 5 accesses are halved."""
    node = node_with(peaks={"fp32": 1e12, "bf16": 4e12})
    wide, narrow = (
        step_of("ddp", 4, node=node, precision="bf16", weights=weights)
        for weights in ("fp32", "bf16")
    )
    assert narrow.columns.update_seconds == pytest.approx(0.7 * wide.columns.update_seconds)
    sent = [sum(step.columns.communication_seconds) for step in (wide, narrow)]
    assert sent[1] == pytest.approx(sent[0] / 2)


def offloaded(name: str) -> tuple[Step, Step]:
    """On 4 ranks, without and with offload; the host has a tenth of the link's bandwidth."""
    node = node_with(host_bytes_per_second=10e9)
    here, there = (step_of(name, 4, node=node, cpu_offload=offload) for offload in (False, True))
    return here, there


@pytest.mark.parametrize(
    ("traffic", "expected_seconds"),
    [
        (Traffic(kind="all_reduce", payload_bytes=1e9, ranks=4), 2 * 3 / 4 / 100),
        (Traffic(kind="reduce_scatter", payload_bytes=1e9, ranks=4), 3 / 4 / 100),
        (Traffic(kind="all_gather", payload_bytes=0.25e9, ranks=4), 3 / 4 / 100),
        # Two nodes: 1/2 of it twice over their network and 3/4 twice over links is less than the
        # ring's 7/8 twice over the network.
        (Traffic(kind="all_reduce", payload_bytes=1e9, ranks=8), 1 / 10 + 2 * 3 / 4 / 100),
        (Traffic(kind="all_gather", payload_bytes=0.125e9, ranks=8), 0.5 / 10 + 0.75 / 100),
        # Four groups of two, one rank of each on either node, share the network.
        (Traffic(kind="all_reduce", payload_bytes=0.25e9, ranks=2, rank_stride=4), 0.25 / 2.5),
        (Traffic(kind="receive", payload_bytes=1e9, ranks=4, sent_by_peers=True), 0),
        (Traffic(kind="all_reduce", payload_bytes=1e9, ranks=1), 0),
    ],
)
def test_collectives_take_what_their_bytes_need(traffic: Traffic, expected_seconds: float) -> None:
    assert collective_seconds(traffic, 4, NODE, PLAIN) == pytest.approx(expected_seconds)


SLOW = Timed(ranks=4, seconds={1_000: 1.0, 1_000_000_000: 1.0})
"""A second, however much."""


@pytest.mark.parametrize(
    ("traffic", "expected_seconds"),
    [
        (Traffic(kind="all_reduce", payload_bytes=1e6, ranks=4), 1.0),
        # Ten calls of a tenth each, and a rank's own part of what is gathered.
        (Traffic(kind="all_reduce", payload_bytes=1e6, ranks=4, calls=10), 10.0),
        (Traffic(kind="all_gather", payload_bytes=1e6 / 4, ranks=4), 1.0),
        # All of it once in twenty steps, not a twentieth of it in each.
        (Traffic(kind="all_reduce", payload_bytes=1e6 / 20, ranks=4, every_steps=20), 1 / 20),
        # By the formula two ranks carry 1 of what four carry 1.5 of.
        (Traffic(kind="all_reduce", payload_bytes=1e6, ranks=2), 1 / 1.5),
        # Not measured, so by the formula: 3/4 over the link.
        (Traffic(kind="all_to_all", payload_bytes=1e9, ranks=4), 0.75e9 / 100e9),
    ],
)
def test_measured_collectives_take_what_was_measured(
    traffic: Traffic, expected_seconds: float
) -> None:
    kinds = dict.fromkeys(("all_reduce", "all_gather"), SLOW)
    node = node_with(link_seconds=kinds)
    assert collective_seconds(traffic, 4, node, PLAIN) == pytest.approx(expected_seconds)


def test_links_that_were_timed_on_a_larger_node_say_what_a_smaller_one_takes() -> None:
    card = CARD.model_copy(update={"link_seconds": {"all_reduce": SLOW}})
    two = NodeType(card=card, node=Node(card="invented", devices=2))
    both = Traffic(kind="all_reduce", payload_bytes=1e6, ranks=2)
    assert collective_seconds(both, 2, two, PLAIN) == pytest.approx(1 / 1.5)


def test_messages_between_nodes_were_timed_with_the_network_to_themselves() -> None:
    network = {"point_to_point": Timed(ranks=2, seconds={1_000: 2.0, 1_000_000_000: 2.0})}
    node = NODE.model_copy(
        update={"node": NODE.node.model_copy(update={"network_seconds": network})}
    )
    one = Traffic(
        kind="send", payload_bytes=1e6, ranks=2, rank_stride=4
    )  # all four of a node at once
    assert collective_seconds(one, 4, node, PLAIN) == pytest.approx(4 * 2.0)


@pytest.mark.parametrize(
    ("ranks_per_node", "expected_seconds"),
    [
        (4, 2 / 100),  # two rounds over links
        (2, 1 / 100 + 2 / 10),  # then both ranks of the first node send to the other at once
        (1, 1 / 10 + 1 / 10),
    ],
)
def test_gloo_broadcasts_along_a_tree(ranks_per_node: int, expected_seconds: float) -> None:
    cpu = CARD.model_copy(update={"device": "cpu"})
    node = NODE.model_copy(update={"card": cpu})
    traffic = Traffic(kind="broadcast", payload_bytes=1e9, ranks=4)
    found = collective_seconds(traffic, ranks_per_node, node, PLAIN)
    assert found == pytest.approx(expected_seconds)


@pytest.mark.parametrize(
    ("gigabytes", "shown_seconds"),
    [
        (1, 3 / 8 * 0.1),  # while it fills and drains: 3 of 8 micro-batches
        (1000, 100 - 12),  # more than the 12 s that each of the 4 ranks computes
    ],
)
def test_other_micro_batches_hide_messages_between_stages(
    gigabytes: float, shown_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = Traffic(
        kind="send", payload_bytes=1e9 * gigabytes, ranks=2, waited_for=True, filling=True
    )
    monkeypatch.setattr(DDPCosts, "library_traffic", lambda *_: (sent,))
    monkeypatch.setattr(DDPCosts, "bubble", lambda *_: 3 / 8)
    step = step_of("ddp", 4, node=node_with(link_bytes_per_second=1e10), per_rank_batch=4)
    assert step.time(PLAIN).waiting_seconds == pytest.approx(shown_seconds)


@pytest.mark.parametrize("has_bf16", [True, False])
@pytest.mark.parametrize(("name", "fraction"), [("ddp", 1), ("zro", 1 / 4)])
def test_products_of_an_update_take_time_on_the_ranks_that_hold_its_state(
    name: str, fraction: float, has_bf16: bool
) -> None:
    """The products are in bf16, also in a recipe of fp32, where the card computes so."""
    peaks = {"fp32": 1e12, **({"bf16": 4e12} if has_bf16 else {})}
    products = Operation(kind="product", flops=Amount(fixed=8e12))
    seconds = [
        step_of(name, 4, model=model, node=node_with(peaks=peaks)).columns.update_seconds
        for model in (profile(), replace(profile(), update_products=products))
    ]
    of_peak = fraction * 8e12 / peaks["bf16" if has_bf16 else "fp32"]
    assert seconds[1] - seconds[0] == pytest.approx(of_peak)


@pytest.mark.parametrize(("name", "accesses"), [("fsdp", 8), ("zero-3", 5)])
def test_the_host_updates_for_all_of_its_ranks(name: str, accesses: int) -> None:
    """The host uses the optimizer's operators, or DeepSpeed's single kernel."""
    here, there = offloaded(name)
    own = GRADIENT_BYTES / 4
    assert here.columns.update_seconds == pytest.approx(5 * own / 1e12)
    there_seconds = 4 * accesses * own / PLAIN.host_memory_bytes_per_second
    assert there.columns.update_seconds == pytest.approx(there_seconds)


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        # Of four units the first gather and the last gradients show: 1/8 of what is fetched twice.
        ("fsdp", 2 * 0.025 / 8 + 0.025 / 4),
        # Gradients as above, and parameters after the update.
        ("zero-2", 0.025 / 4 + 0.025),
    ],
)
def test_what_moves_to_and_from_the_host_is_waited_for_where_nothing_hides_it(
    name: str, seconds: float
) -> None:
    """A quarter of 1 GB takes 25 ms at 10 GB/s."""
    here, there = (step.time(PLAIN).waiting_seconds for step in offloaded(name))
    assert there - here == pytest.approx(seconds, rel=1e-6)


def test_a_way_to_the_host_that_nobody_knows_is_named() -> None:
    with pytest.raises(InputError, match="host_bytes_per_second"):
        step_of("fsdp", 4, cpu_offload=True).time(PLAIN)


def test_messages_take_latency_by_step() -> None:
    """A ring of four takes three steps to reduce and three to gather."""
    slow = replace(PLAIN, link_seconds=1.0)
    tiny = Traffic(kind="all_reduce", payload_bytes=4.0, ranks=4)
    assert collective_seconds(tiny, 4, NODE, slow) == pytest.approx(6, rel=1e-6)


@pytest.mark.parametrize(("device", "expected_seconds"), [("cpu", 3.0), ("cuda", 0.0)])
def test_a_processor_runs_ahead_of_a_gpu(device: str, expected_seconds: float) -> None:
    card = CARD.model_copy(update={"device": device, "operation_seconds": 1.0})
    three = [Operation(kind="other", calls=3)]
    found = operation_seconds(three, 1, card, Recipe(steps=1, per_rank_batch=2), PLAIN)
    assert found == expected_seconds


def test_the_flops_and_the_bytes_of_an_operation_overlap_in_part() -> None:
    """1 ms of FLOPs in fp32, a quarter of it on tensor cores, and 5 ms of bytes, for a sample."""
    product = Operation(kind="product", flops=Amount(per_sample=1e9), bytes=Amount(per_sample=5e9))
    fp32, fp16 = (Recipe(steps=1, per_rank_batch=1, precision=name) for name in ("fp32", "fp16"))
    assert operation_seconds([product], 2, CARD, fp32, PLAIN) == pytest.approx(hypot(2, 10) / 1e3)
    assert operation_seconds([product], 2, CARD, fp16, PLAIN) == pytest.approx(hypot(0.5, 10) / 1e3)
    with pytest.raises(InputError, match="has no bf16"):
        CARD.peak("bf16")


FLOPS_ALONE = Amount(per_sample=1e9)
KINDS: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if kind != "fp8_product")


@pytest.mark.parametrize(
    ("precision", "tf32", "expected_milliseconds"),
    [
        # The peaks are 1, 2 and 4 TFLOP/s: ordinary cores, TF32 and 16 bits.
        ("fp16", False, (0.625, 1.125, 0.525, 0.525, 1.375, 10, 1.25)),
        ("fp32", True, (1.25, 2.25, 1.05, 1.05, 2.75, 10, 1.25)),
        ("fp32", False, (1.25, 1.25, 2.5, 1.25, 7.8125, 10, 1.25)),
    ],
)
def test_kinds_of_operations_reach_unlike_fractions_of_the_peak(
    precision: Precision, tf32: bool, expected_milliseconds: tuple[float, ...]
) -> None:
    constants = replace(
        PLAIN,
        core_share=0.8,
        core_convolution_share=0.4,
        product_share=0.5,
        attention_share=0.25,
        convolution_share=0.625,
        grouped_share=0.2,
        depthwise_share=0.1,
        operand_rate=8.0,
        winograd_factor=2.0,
    )
    card = CARD.model_copy(update={"peaks": {"fp32": 1e12, "tf32": 2e12, "fp16": 4e12}})
    recipe = Recipe(steps=1, per_rank_batch=1, precision=precision, tf32=tf32)
    seconds = [
        operation_seconds([Operation(kind=kind, flops=FLOPS_ALONE)], 1, card, recipe, constants)
        for kind in KINDS
    ]
    assert seconds == pytest.approx([ms / 1e3 for ms in expected_milliseconds])


@pytest.mark.parametrize(
    ("kind", "precision", "channels_last", "accesses"),
    [
        ("convolution", "fp16", False, 3),
        ("convolution", "fp16", True, 1),
        ("grouped", "fp16", False, 3),
        ("product", "fp16", False, 1),
        ("convolution", "fp32", False, 1),  # ordinary cores take both orders
        ("depthwise", "fp16", True, 2),
    ],
)
def test_tensor_cores_transpose_images_that_are_not_channels_last(
    kind: Kind, precision: Precision, channels_last: bool, accesses: int
) -> None:
    constants = replace(PLAIN, transposed_accesses=2, depthwise_accesses=2)
    moved = Operation(kind=kind, bytes=Amount(per_sample=1e9))
    recipe = Recipe(steps=1, per_rank_batch=1, precision=precision, channels_last=channels_last)
    seconds = operation_seconds([moved], 1, CARD, recipe, constants)
    assert seconds == pytest.approx(accesses / 1e3)


@pytest.mark.parametrize(
    ("strategy", "ranks", "prepares", "expected_seconds"),
    [
        ("single", 1, False, 8 * 2.0),  # the host launches 6 operations and 2 tensors' update
        ("single", 1, True, 8 * 2.0 + 2 * 3.0),  # and prepares 2 samples
        # One process launches the forward passes of four devices, and copies 2 tensors to each.
        ("dp", 4, False, (4 * 2 + 4 + 2) * 2.0 + 8 * 5.0),
        # What DDP's own code does in each step and pass.
        ("ddp", 4, False, (8 + 0.2 * (229 + 17)) * 2.0),
    ],
)
def test_a_short_step_takes_the_time_of_its_host(
    strategy: str, ranks: int, prepares: bool, expected_seconds: float
) -> None:
    constants = replace(PLAIN, launch_seconds=2.0, sample_seconds=3.0, replica_seconds=5.0)
    unit = Unit(
        name="all",
        parameters=4,
        trained_parameters=4,
        forward=(Operation(kind="product", calls=2, flops=FLOPS_ALONE),),
        backward=(Operation(kind="product", calls=4, flops=FLOPS_ALONE),),
    )
    size = ModelSize(parameters=4, trained_parameters=4, trained_matrices=((2, 2, 2),))
    made = Profile(units=(unit,), size=size, host_prepares_samples=prepares)
    batch: dict[str, Any] = {"per_rank_batch": None, "global_batch": 2 * ranks}
    step = step_of(strategy, ranks, model=made, constants=constants, **batch)
    assert step.time(constants).compute_seconds == pytest.approx(expected_seconds)
    assert step.host_bound.all()


def test_data_parallel_waits_for_parameters_and_for_gradients() -> None:
    """1 GB to the other devices and 1 GB of sums back, over links of 100 GB/s."""
    waited = step_of("dp", 4, per_rank_batch=None, global_batch=8).time(PLAIN).waiting_seconds
    assert waited == pytest.approx(2 * 0.75 * 0.01)
    assert step_of("dp", 1, per_rank_batch=None, global_batch=2).time(PLAIN).waiting_seconds == 0


@pytest.mark.parametrize(
    ("card", "gigabytes_per_second"),
    [
        ({"link_bytes_per_second": None, "host_bytes_per_second": 20e9}, 10),
        # Through the host's memory.
        (
            {
                "link_bytes_per_second": None,
                "host_bytes_per_second": 20e9,
                "peer_access": False,
            },
            5,
        ),
        ({"peer_access": False}, 50),  # it has links
    ],
)
def test_cards_without_peer_access_send_through_the_host(
    card: dict[str, Any], gigabytes_per_second: float
) -> None:
    constants = replace(PLAIN, link_share=0.5, staged_share=0.25)
    node = node_with(**card)
    message = Traffic(kind="all_reduce", payload_bytes=1e9, ranks=2)
    seconds = collective_seconds(message, 4, node, constants)
    assert seconds == pytest.approx(1 / gigabytes_per_second)


@pytest.mark.parametrize("name", ["rtx-3090", "rtx-4090", "rtx-5090", "l4", "l40s", "a10g", "a10"])
def test_the_cards_without_peer_access_are_marked(name: str) -> None:
    assert load_node(f"{name}x2").staged
    assert not load_node("rtx-a6000x2").staged


@pytest.mark.parametrize(
    ("strategy", "options", "hops"),
    [
        # A unit is one message, however large: gathered for both passes, and reduced once.
        ("fsdp", {}, 4 * 2 * 3 + 4 * 3),
        ("ddp", {}, 2 * 3 * 39),  # buckets of 25 MiB: 1 GB are 39
        ("ddp", {"bucket_mb": 250.0}, 2 * 3 * 4),
        ("zero-2", {"bucket_mb": 250.0}, 3 * 4 + 3 * 4),
    ],
)
def test_messages_are_those_that_the_library_sends(
    strategy: str, options: dict[str, Any], hops: int
) -> None:
    size = ModelSize(parameters=250_000_000, trained_parameters=250_000_000, units=4)
    cell = Cell(size=size, recipe=Recipe(steps=1, per_rank_batch=2), world_size=4)
    latency = replace(PLAIN, link_seconds=1.0)
    traffic = cost_model(build_strategy(strategy, options)).library_traffic(cell)
    seconds = sum(collective_seconds(part, 4, NODE, latency) for part in traffic)
    sent = sum(collective_seconds(part, 4, NODE, PLAIN) for part in traffic)
    assert seconds - sent == pytest.approx(hops)


@pytest.mark.parametrize(
    ("computing", "gathering", "reducing", "expected"),
    [
        ([2, 2, 2], [0, 0, 0], [0, 0, 0], 6),
        ([2, 2, 2], [0, 0, 0], [3, 3, 3], 11),  # DDP: the first bucket waits for its gradients
        ([2, 2], [1, 3], [0, 0], 6),  # FSDP: the first gather is waited for, the second shows 1
        ([2, 2, 2], [0, 1, 1], [4, 0, 0], 9),  # what was asked for first is sent first
    ],
)
def test_two_streams(
    computing: list[float], gathering: list[float], reducing: list[float], expected: float
) -> None:
    assert two_streams(computing, gathering, reducing) == expected


def test_ranks_wait_for_the_slowest_of_them() -> None:
    constants = replace(PLAIN, distribution=0.02, spread=0.01)
    assert distribution_tax(1, 1, constants) == 0
    assert distribution_tax(8, 4, constants) == pytest.approx(0.02 + 0.005 * sqrt(2 * log(8)))


def test_ddp_hides_all_buckets_but_the_last() -> None:
    """1 GB over two links of 100 GB/s takes 10 ms, a quarter of it after the backward pass."""
    update = 5 * GRADIENT_BYTES / 1e12
    alone, both = step_of("single", 1).time(PLAIN), step_of("ddp", 2).time(PLAIN)
    assert alone.seconds == pytest.approx(6 + update)
    assert both.compute_seconds == pytest.approx(alone.seconds)
    assert both.waiting_seconds == pytest.approx(0.010 / UNITS)
    slowed = step_of("ddp", 2).time(replace(PLAIN, interference=0.5))
    assert slowed.interference_seconds == pytest.approx(0.5 * 0.010 * (1 - 1 / UNITS))


def test_accumulation_reduces_once_and_fsdp_gathers_in_each_pass() -> None:
    ddp = step_of("ddp", 2, per_rank_batch=8, gradient_accumulation=4)
    assert ddp.time(PLAIN).seconds == pytest.approx(24 + 5e-3 + 0.010 / UNITS)
    fsdp = step_of("fsdp", 2, per_rank_batch=8, gradient_accumulation=4)
    # Shown: the first gather of each pass, and the last reduce-scatter.
    copied = 2 * GRADIENT_BYTES / 1e12  # read and written
    gather, scatter = (0.005 + copied) / UNITS, (0.005 + copied) / UNITS
    assert fsdp.time(PLAIN).waiting_seconds == pytest.approx(4 * gather + scatter)
    assert fsdp.columns.update_seconds == pytest.approx(ddp.columns.update_seconds / 2)


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({"schedule": "1f1b", "micro_batches": 8}, 3 / 8),
        ({"schedule": "interleaved", "micro_batches": 8}, 3 / 16),
        ({"schedule": "zero-bubble", "micro_batches": 8}, 1 / 16),
    ],
)
def test_pipelines_wait_until_they_are_full(options: dict[str, Any], share: float) -> None:
    found = step_of("pp", 4, options, per_rank_batch=8).time(PLAIN)
    assert found.bubble_seconds == pytest.approx(share * 24 / 4)  # each stage has a quarter


@dataclass(frozen=True, slots=True, kw_only=True)
class Invented(Strategy):
    """A strategy that comes without a cost model."""

    name: str = "invented"

    def start(self, workload: Any, recipe: Recipe, context: Any) -> Any:
        raise NotImplementedError


class InventedCosts(Costs[Invented]):
    """Gradients all-reduced at once after the backward pass."""

    def required_traffic(self, cell: Cell) -> RequiredTraffic:
        all_reduce = Traffic(
            kind="all_reduce",
            payload_bytes=4 * cell.size.trained_parameters,
            ranks=cell.world_size,
            waited_for=True,
        )
        return RequiredTraffic(traffic=(all_reduce,), formula="all of it, after the step")


def test_a_new_strategy_is_predicted_once_it_has_a_cost_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(InputError, match="there is no cost model for invented"):
        step_of(Invented(), 2)
    monkeypatch.setattr(Invented, "costs", f"{__name__}:InventedCosts")
    assert step_of(Invented(), 2).time(PLAIN).waiting_seconds == pytest.approx(0.010)


def test_calibration_finds_how_a_machine_differs() -> None:
    step, truth = step_of("ddp", 8), Factors(compute=0.3, communication=7.0)
    constants = Constants()
    measured = step.time(constants, truth).seconds
    alone = step_of("single", 1)
    first = calibrate_compute(alone, alone.time(constants, truth).seconds, 2, constants, Factors())
    both = calibrate_communication(step, measured, constants, first)
    assert both.compute == pytest.approx(0.3, rel=2e-3)
    assert both.communication == pytest.approx(7.0, rel=2e-2)
    with pytest.raises(InputError, match="1 sample at a time"):
        calibrate_compute(step, measured, 1, constants, Factors())
    with pytest.raises(InputError, match="check the card"):
        calibrate_compute(step, 1e-3, 2, constants, Factors())


def test_intervals_are_around_the_prediction() -> None:
    for kind in RESIDUALS:
        low, high = RESIDUALS[kind].around(2.0)
        assert low < 2.0 < high, kind


def test_measured_latencies_count_in_place_of_usual_ones() -> None:
    """Two messages of an all-reduce over two nodes, a round each way."""
    link = Traffic(kind="all_reduce", payload_bytes=1.0, ranks=2)
    slow = Node(
        card="invented", devices=1, network_bytes_per_second=10e9, network_latency_seconds=0.5
    )
    seconds = collective_seconds(link, 1, NodeType(card=CARD, node=slow), PLAIN)
    assert seconds == pytest.approx(1.0)
    card = CARD.model_copy(update={"link_latency_seconds": 0.25})
    inside = NodeType(card=card, node=Node(card="invented", devices=2))
    assert collective_seconds(link, 2, inside, PLAIN) == pytest.approx(0.5)


def test_ranks_that_share_cores_slow_one_another_down() -> None:
    """The factor is the one measured with all of them, and 1 for a single rank."""
    node = NodeType(card=CARD, node=Node(card="invented", devices=4, shared_speed=0.5))
    assert [node.slowdown(ranks) for ranks in (1, 4, 8)] == [1.0, 2.0, 2.0]
    assert node.slowdown(2) == pytest.approx(4 / 3)
    alone, among = (step_of("ddp", ranks, node=node).forward_seconds for ranks in (1, 4))
    assert among == pytest.approx(2 * alone)


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
