"""Predicts operations and collectives by formulas from data of a card and a network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Any, Literal, TypeAlias

import numpy as np

from shardmark.base.errors import InputError
from shardmark.base.recipe import Recipe
from shardmark.base.traffic import Traffic, required_fraction
from shardmark.predict.hardware.catalogue import Card, NodeType
from shardmark.predict.profile import Kind, Operation
from shardmark.ranks.costs.base import FP32_BYTES, PRECISION_BYTES

Numbers: TypeAlias = Any
"""A number, or an array with one number for each layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Constants that no data sheet gives, derived in `docs/method/prediction.md`."""

    core_share: float = 0.95
    """Fraction of the peak that products reach without tensor cores."""
    core_convolution_share: float = 0.6
    """The same for dense convolutions."""
    product_share: float = 0.92
    """Fraction of the peak that products reach on tensor cores whose operands wait for nothing."""
    attention_share: float = 0.38
    """The same for fused attention."""
    convolution_share: float = 0.81
    """The same for dense convolutions."""
    grouped_share: float = 0.28
    """The same for convolutions with groups."""
    depthwise_share: float = 0.072
    """Fraction of the ordinary cores' peak that depthwise convolutions reach."""
    depthwise_accesses: float = 2.8
    """Accesses to each value of a depthwise convolution, whose kernels read values again."""
    operand_rate: float = 86.0
    """FLOP/s of tensor cores that operands of 16 bits arrive for, over the peak of ordinary cores:
    the faster tensor cores are beside ordinary ones, the smaller is the fraction they reach."""
    winograd_factor: float = 2.1
    """Products that Winograd's algorithm saves: direct ones over those that are left."""
    transposed_accesses: float = 3.5
    """Accesses to each value of a convolution on tensor cores beside its own, if images are not
    channels-last: they are transposed."""
    memory_share: float = 0.76
    """Fraction of the memory's bandwidth that operations reach."""
    call_seconds: float = 4e-6
    """Time of an operation on the device beside its work."""
    tile_seconds: float = 18e-6
    """The same of a product or convolution, whose last tiles do not fill the device."""
    launch_seconds: float = 3e-5
    """Time in which the host's Python code and libraries launch one operation on a GPU."""
    replica_seconds: float = 70e-6
    """Time in which the host makes one tensor of a replica, for `DataParallel`."""
    sample_seconds: float = 100e-6
    """Time in which the host prepares a sample, if no loader's workers do."""
    link_share: float = 0.7
    """Fraction of the links' bandwidth that a ring reaches."""
    staged_share: float = 0.2
    """Fraction of the bandwidth to the host that a ring reaches through the host's memory."""
    network_share: float = 0.7
    """Fraction of the network's bandwidth that is reached between nodes."""
    link_seconds: float = 10e-6
    """Latency of a message between cards of a node."""
    network_seconds: float = 20e-6
    """Latency of a message between nodes."""
    host_memory_bytes_per_second: float = 100e9
    """Memory bandwidth of an update on a node's CPUs.  A guess."""
    interference: float = 0.5
    """Fraction of hidden communication that slows computation: it takes bandwidth and cores."""
    distribution: float = 0.015
    """Extra computing time of each of several ranks, for hooks, buckets and shared hosts."""
    spread: float = 0.01
    """Standard deviation of a rank's relative computing time: all wait for the slowest."""
    language: float = 1.0
    """Factor on the computing time of language models on GPUs, unless a compiler fuses their
    operations: it depends on the software."""


Stack = Literal["eager", "fused"]
"""Vintage of the software: `eager`, of 2018 to 2023, stores the scores of attention; `fused`, of
2023 or later, has FlashAttention or like kernels, and often fused norms, losses and updates."""
CONSTANTS: Mapping[Stack, Constants] = {
    "eager": Constants(language=0.97),
    "fused": Constants(language=0.84),
}
"""Constants of each stack, fitted to published runs with it; of `fused` without those of 2023."""


def operation_seconds(
    operations: Iterable[Operation],
    samples: Numbers,
    card: Card,
    recipe: Recipe,
    constants: Constants,
    *,
    tensor: Numbers = 1,
    sequence: Numbers = 1,
) -> Numbers:
    """Predict operations of one pass, each by its FLOPs and its bytes, which overlap in part.

    Tensor- and sequence-parallel ranks share the work of an operation, and each starts it.
    Raises `InputError` for a precision that the card does not have in hardware.

    Source: roofline (Williams et al., CACM 52 (2009), 65-76), with a rounded corner.
    """
    bandwidth = constants.memory_share * card.bandwidth
    on_cpu = card.device_type == "cpu"
    seconds = 0.0 * samples
    for operation in operations:
        speed, accesses = _reached(operation.kind, card, recipe, constants)
        moved = accesses * operation.bytes.at(samples, tensor) / bandwidth / sequence
        computed = operation.flops.at(samples, tensor) / sequence / speed
        started = constants.call_seconds if operation.kind == "other" else constants.tile_seconds
        if on_cpu:  # a measured time is that of the CPU, which starts operations one by one
            started = card.operation_seconds or constants.call_seconds
        seconds = seconds + np.hypot(computed, moved) + operation.calls * started
    return seconds


def _reached(kind: Kind, card: Card, recipe: Recipe, constants: Constants) -> tuple[float, float]:
    """FLOP/s that operations of a kind reach, and accesses to each of their bytes."""
    if kind == "fp8_product":
        return PRODUCT_SHARE * card.peak("fp8"), 1.0
    cores = card.peak("fp32")
    peak = card.peak(recipe.precision, tf32=recipe.tf32)
    if card.device_type == "cpu" or kind == "other":
        return constants.core_share * (cores if kind == "other" else peak), 1.0
    if kind == "depthwise":
        return constants.depthwise_share * cores, constants.depthwise_accesses
    dense, is_image = constants.convolution_share, kind not in {"product", "attention"}
    if peak > cores:
        shares = {
            "product": constants.product_share,
            "attention": constants.attention_share,
            "grouped": constants.grouped_share,
        }
        # Both times add up: that of the products, and that until their operands arrive.  Those of
        # TF32 have 32 bits, twice as many as others.
        width = PRECISION_BYTES[recipe.precision] / PRECISION_BYTES["bf16"]
        slowdown = 1 / shares.get(kind, dense) + width * peak / cores / constants.operand_rate
        extra = constants.transposed_accesses if is_image and not recipe.channels_last else 0.0
        return peak / slowdown, 1.0 + extra
    if not is_image:
        return constants.core_share * cores, 1.0
    factors = {
        "grouped": constants.grouped_share / dense,
        "convolution_3x3": constants.winograd_factor,
    }
    return factors.get(kind, 1.0) * constants.core_convolution_share * cores, 1.0


def host_seconds_of_pass(
    launches: Numbers, replicas: Numbers, samples: Numbers, card: Card, constants: Constants
) -> Numbers:
    """Time in which the host launches a pass; on a CPU it is part of each operation.

    `replicas` counts tensors of replicas that it makes, `samples` those that it prepares.
    """
    if card.device_type == "cpu":
        return 0.0 * samples
    return (
        launches * constants.launch_seconds
        + replicas * constants.replica_seconds
        + samples * constants.sample_seconds
    )


def copy_seconds(moved_bytes: float, card: Card, constants: Constants) -> float:
    """Time to read and write so many bytes in the card's memory."""
    return moved_bytes / (constants.memory_share * card.bandwidth)


def interference(node: NodeType, constants: Constants) -> float:
    """Fraction of hidden communication that slows computation: all of it on a CPU."""
    return 1.0 if node.card.device_type == "cpu" else constants.interference


def host_seconds(moved_bytes: float, card: Card, constants: Constants) -> float:
    """Time to copy bytes between card and host.  Raises `InputError` without a bandwidth."""
    if not moved_bytes:
        return 0.0
    if card.host_bytes_per_second is None:
        allowed = "give host_bytes_per_second in its file, or leave recipe.cpu_offload out"
        raise InputError("--on", "the bandwidth from the card to its host is not known", allowed)
    return moved_bytes / (constants.link_share * card.host_bytes_per_second)


def update_products_seconds(
    products: Operation, fraction: float, card: Card, recipe: Recipe, constants: Constants
) -> float:
    """Time of a fraction of an update's products: in bf16, or fp32 if the card has no bf16."""
    if not products.calls:
        return 0.0
    part = replace(products, flops=products.flops.times(fraction), calls=fraction * products.calls)
    for precision in ("bf16", "fp32"):
        typed = recipe.model_copy(update={"precision": precision})
        with suppress(InputError):
            return float(np.sum(operation_seconds([part], 1.0, card, typed, constants)))
    return 0.0


def update_seconds(
    accesses: float, node: NodeType, constants: Constants, *, sharing: int | None = None
) -> float:
    """Time of so many accesses to fp32 values on the card, or on a host that ranks share.

    `sharing` is the number of ranks of a host; None for an update on the card.
    """
    moved = FP32_BYTES * accesses
    if sharing is None:
        return copy_seconds(moved, node.card, constants)
    measured = node.node.host_memory_bytes_per_second
    bandwidth = constants.host_memory_bytes_per_second if measured is None else measured
    return sharing * moved / bandwidth


def collective_seconds(
    traffic: Traffic, ranks_per_node: int, node: NodeType, constants: Constants
) -> float:
    """Predict a collective by formula, scaled by a measurement of that size if there is one."""
    if (period := traffic.every_steps) != 1:
        full = replace(traffic, payload_bytes=period * traffic.payload_bytes, every_steps=1.0)
        return collective_seconds(full, ranks_per_node, node, constants) / period
    seconds = _by_formula(traffic, ranks_per_node, node, constants)
    within = _inside(traffic, ranks_per_node) == traffic.ranks
    measured = node.card.link_seconds if within else node.node.network_seconds
    kind = "point_to_point" if traffic.kind in {"send", "receive"} else traffic.kind
    if not seconds or kind not in measured:
        return seconds
    timed = measured[kind]
    parts = traffic.ranks if traffic.kind == "all_gather" else 1
    payload = parts * traffic.payload_bytes / max(traffic.calls, 1)
    like = Traffic(
        kind="send" if kind == "point_to_point" else kind,
        payload_bytes=payload / (timed.ranks if kind == "all_gather" else 1),
        ranks=timed.ranks,
    )
    at_once = node.node.devices
    if within:  # it may have been timed on a node of more ranks
        at_once = max(at_once, timed.ranks)
    elif kind == "point_to_point":  # it was timed with one rank on each node
        at_once = 1
    return seconds * timed.seconds_of(payload) / _by_formula(like, at_once, node, constants)


def _inside(traffic: Traffic, ranks_per_node: int) -> int:
    """Number of the group's ranks on one node."""
    return min(traffic.ranks, max(1, ranks_per_node // traffic.rank_stride))


def _by_formula(
    traffic: Traffic, ranks_per_node: int, node: NodeType, constants: Constants
) -> float:
    """Time of a collective without measurements of it.

    On GPUs it is the faster of a ring over all ranks and rings in each node with trees between
    nodes.  On CPUs it is a ring, with an all-reduce for a reduce-scatter, and a tree to broadcast.
    Groups with a rank stride share the network of a node.  Source: Patarasuk and Yuan,
    J. Parallel Distrib. Comput. 69 (2009), 117-124; Thakur and others, Int. J. High Performance
    Computing Applications 19 (2005), 49-66.
    """
    on_cpu = node.card.device_type == "cpu"
    kind = "all_reduce" if on_cpu and traffic.kind == "reduce_scatter" else traffic.kind
    ranks, payload = traffic.ranks, traffic.payload_bytes
    share = required_fraction(kind, ranks)
    if ranks < 2 or not payload or not share or traffic.sent_by_peers:
        return 0.0
    link_latency = node.card.link_latency_seconds or constants.link_seconds
    network_latency = node.node.network_latency_seconds or constants.network_seconds
    calls = max(1.0, traffic.calls)
    inside = _inside(traffic, ranks_per_node)
    share_of_link = constants.staged_share if node.staged else constants.link_share
    link = share_of_link * node.link_bytes_per_second(inside) if inside > 1 else float("inf")
    rounds = 2 if kind == "all_reduce" else 1
    hops = 1 if kind in {"send", "receive"} else ranks - 1
    if on_cpu and kind == "broadcast":
        near = ceil(log2(inside))
        far = ceil(log2(ranks)) - near
        seconds = calls * near * link_latency + near * payload / link
        if far:  # all ranks of a node that have received it send at once
            network = constants.network_share * node.network_bytes_per_second / ranks_per_node
            seconds += far * (calls * network_latency + payload / network)
        return seconds
    if inside == ranks:
        return calls * rounds * hops * link_latency + share * payload / link
    between = ceil(ranks / inside)
    share *= traffic.crossing
    network = constants.network_share * node.network_bytes_per_second * inside / ranks_per_node
    ring = calls * rounds * hops * network_latency + share * payload / min(link, network)
    if on_cpu:
        return ring
    # The payload of a gather is one rank's shard; all shards of a node go to other nodes.
    parts = inside if kind == "all_gather" else 1
    outer = (required_fraction(kind, between) or 0.0) * parts * payload / network
    inner = (required_fraction(kind, inside) or 0.0) * payload / link
    if kind == "all_gather":
        inner *= between
    steps = (inside - 1) * link_latency + ceil(log2(between)) * network_latency
    return min(ring, calls * rounds * steps + outer + inner)


PRODUCT_SHARE = 0.8
"""Fraction of the peak that products reach in 8 bits.  Set by hand between published rows of Llama
3 8B on H100, MI300X and B200, as `docs/method/prediction.md` says."""
INPUT_BYTES = 2 / 3
"""Fraction of a product's 16-bit bytes that are its two inputs; the rest is its result."""
CAST_BYTES = 1.5
"""Bytes that a cast moves for each byte of its 16-bit input, whose scale the operation before it
has found: it reads two bytes of each value and writes one."""


def in_fp8(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yield a block's operations, with casts and 8-bit products in place of 16-bit products.

    The matrices of a block's linear layers are cast, as torchao and Transformer Engine do, but not
    attention, embeddings and the last layer.  Memory stays: layers save their inputs in 16 bits.
    """
    for operation in operations:
        if operation.kind != "product":
            yield operation
            continue
        inputs = operation.bytes.times(INPUT_BYTES)
        yield Operation(kind="other", bytes=inputs.times(CAST_BYTES), calls=2 * operation.calls)
        yield Operation(
            kind="fp8_product",
            flops=operation.flops,
            bytes=operation.bytes.times(1 - INPUT_BYTES / 2),
            calls=operation.calls,
        )
