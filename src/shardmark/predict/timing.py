"""Seconds of operations and of collectives: formulas of a card's and a network's figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, log2

from shardmark.core.errors import InputError
from shardmark.core.recipe import Recipe
from shardmark.core.traffic import Traffic, required_fraction
from shardmark.costs.base import FP32_BYTES
from shardmark.predict.hardware.catalogue import Card, NodeType
from shardmark.predict.profile import Operation

MESSAGE_BYTES = 25 * 2**20
"""Of one call: DistributedDataParallel's bucket.  Larger units are cut, smaller ones merged."""
UPDATE_ACCESSES = {"sgd": 5, "adam": 7}
"""Of each trained parameter's fp32 values in an update: gradient and weight, a weight written, and
one or two averages read and written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What no data sheet says; each is derived in `docs/method/prediction.md`."""

    core_share: float = 0.85
    """Of the peak that products and convolutions reach on ordinary cores."""
    product_share: float = 0.65
    """Of their peak that products reach on tensor cores."""
    convolution_share: float = 0.4
    """The same of convolutions, whose shapes fill them less well."""
    memory_share: float = 0.75
    """Of the memory's bandwidth."""
    call_seconds: float = 5e-6
    """From one operation to the next."""
    link_share: float = 0.7
    """Of the links' bandwidth that a ring gets."""
    network_share: float = 0.6
    """Of the network's bandwidth between nodes."""
    link_seconds: float = 10e-6
    """Of one message between cards of a node."""
    network_seconds: float = 20e-6
    """Of one message between nodes."""
    host_memory_bytes_per_second: float = 100e9
    """That an update on a node's processors gets of their memory.  A guess."""
    interference: float = 0.5
    """Of hidden communication that still shows: it takes memory bandwidth and cores."""
    distribution: float = 0.02
    """Of computing, that several ranks take longer each: hooks, buckets, shared hosts."""
    spread: float = 0.01
    """Standard deviation of a rank's computing: the slowest of n is waited for."""


def operation_seconds(
    operations: Iterable[Operation],
    samples: float,
    card: Card,
    recipe: Recipe,
    constants: Constants,
    *,
    tensor: int = 1,
    sequence: int = 1,
) -> float:
    """Products take their FLOPs and then their bytes; all else what takes longer of the two.

    Each operation is divided over ranks that share layers or sequences, as far as these do, and
    started on every one of them.

    Source: roofline (Williams et al., CACM 52 (2009), 65-76), without its overlap for products.
    """
    fp32 = card.peak("fp32")
    peak = card.peak(recipe.precision, tf32=recipe.tf32)
    shares = {"product": constants.product_share, "convolution": constants.convolution_share}
    bandwidth = constants.memory_share * card.memory_bytes_per_second
    # On a GPU the time between operations hides behind them: what was measured is a processor's.
    measured = card.operation_seconds if card.device_type == "cpu" else None
    started = measured or constants.call_seconds
    seconds = 0.0
    for each in operations:
        moved = each.bytes.at(samples, tensor) / bandwidth / sequence
        flops = each.flops.at(samples, tensor) / sequence
        if each.kind == "other":
            seconds += max(flops / (constants.core_share * fp32), moved)
        else:
            share = shares[each.kind] if peak > fp32 else constants.core_share
            seconds += flops / (share * peak) + moved
        seconds += each.calls * started
    return seconds


def copy_seconds(moved_bytes: float, card: Card, constants: Constants) -> float:
    """Of bytes read and written in the card's memory."""
    return moved_bytes / (constants.memory_share * card.memory_bytes_per_second)


def interference(node: NodeType, constants: Constants) -> float:
    """Share of hidden communication that shows: all of it where the same cores move messages."""
    return 1.0 if node.card.device_type == "cpu" else constants.interference


def host_seconds(moved_bytes: float, card: Card, constants: Constants) -> float:
    """Of bytes between a card and its host.  Raises `InputError` where nothing is known."""
    if not moved_bytes:
        return 0.0
    if card.host_bytes_per_second is None:
        allowed = "give host_bytes_per_second in its file, or leave recipe.cpu_offload out"
        raise InputError("--on", "nothing is known of the way from the card to its host", allowed)
    return moved_bytes / (constants.link_share * card.host_bytes_per_second)


def update_seconds(
    values: float,
    optimizer: str,
    node: NodeType,
    constants: Constants,
    *,
    sharing: int | None = None,
) -> float:
    """Of an update of so many parameters on the card; on the host by all `sharing` ranks of it."""
    moved = UPDATE_ACCESSES["sgd" if optimizer == "sgd" else "adam"] * FP32_BYTES * values
    if sharing is None:
        return copy_seconds(moved, node.card, constants)
    own = node.node.host_memory_bytes_per_second
    bandwidth = constants.host_memory_bytes_per_second if own is None else own
    return sharing * moved / bandwidth


def collective_seconds(
    traffic: Traffic, ranks_per_node: int, node: NodeType, constants: Constants
) -> float:
    """By formula, and as much longer as one of that size took where it was measured."""
    if (every := traffic.every_steps) != 1:
        whole = replace(traffic, payload_bytes=every * traffic.payload_bytes, every_steps=1.0)
        return collective_seconds(whole, ranks_per_node, node, constants) / every
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
    if within:  # maybe on a node of more ranks than this one
        at_once = max(at_once, timed.ranks)
    elif kind == "point_to_point":  # was timed with one rank of each node
        at_once = 1
    return seconds * timed.of(payload) / _by_formula(like, at_once, node, constants)


def _inside(traffic: Traffic, ranks_per_node: int) -> int:
    """Ranks of its group on one node."""
    return min(traffic.ranks, max(1, ranks_per_node // traffic.rank_stride))


def _by_formula(
    traffic: Traffic, ranks_per_node: int, node: NodeType, constants: Constants
) -> float:
    """The faster of one ring over all ranks, and rings in each node with trees between nodes; on
    CPUs the ring, in which gloo also adds up what is to be scattered, and a tree to broadcast.

    Groups whose ranks lie apart use the network of a node together.  Source: Patarasuk and Yuan,
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
    calls = max(traffic.calls, ceil(payload * max(1.0, share / 2) / MESSAGE_BYTES))
    inside = _inside(traffic, ranks_per_node)
    link = constants.link_share * node.link_bytes_per_second(inside) if inside > 1 else float("inf")
    rounds = 2 if kind == "all_reduce" else 1
    hops = 1 if kind in {"send", "receive"} else ranks - 1
    if on_cpu and kind == "broadcast":
        near = ceil(log2(inside))
        far = ceil(log2(ranks)) - near
        seconds = calls * near * link_latency + near * payload / link
        if far:  # all that have it by then send at once
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
    # A gather hands in a rank's own part: a node's parts pass between nodes.
    parts = inside if kind == "all_gather" else 1
    outer = (required_fraction(kind, between) or 0.0) * parts * payload / network
    inner = (required_fraction(kind, inside) or 0.0) * payload / link
    if kind == "all_gather":
        inner *= between
    steps = (inside - 1) * link_latency + ceil(log2(between)) * network_latency
    return min(ring, calls * rounds * steps + outer + inner)
