"""Messages: parameters are cut into buckets; a bad message is an error that names the rank."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from shardmark.base.errors import ShardmarkError
from shardmark.extras.parameter_server.messages import (
    ALIGNED_ELEMENTS,
    HEADER,
    Kind,
    Partition,
    partition_parameters,
    receive_step_shard,
    send,
    send_numbers,
    to_bytes,
)
from shardmark.extras.parameter_server.worker import WorkerGroup
from shardmark.ranks.workloads.base import ParameterGroup
from tests.unit.extras.parameter_server.network import COUNTS, Scene, Served

NO_VALUE = (Kind.GATHER, 4, 0)
HEADERS: dict[str, tuple[float, float, float]] = {
    "no kind": (0, 0, 0),
    "half a kind": (1.5, 0, 0),
    "no number": (math.nan, 0, 0),
    "no finite number": (Kind.GATHER, math.inf, 0),
    "more than any memory": (Kind.GATHER, 2.0**60, 0),
    "nothing to gather": (Kind.GATHER, 0, 0),
    "a step before the first": (Kind.STEP_SHARD, -1, 0),
    "half a step": (Kind.STEP_SHARD, 0.5, 0),
    "a rate that is none": (Kind.PUSH, 0, math.nan),
    "a rate that goes back": (Kind.PUSH, 0, -0.1),
    "a value that is none": NO_VALUE,
}


def say(scene: Scene, rank: int, *numbers: float) -> None:
    with scene.network.being(rank):
        send(torch.tensor(numbers, dtype=torch.float64), scene.network.server, HEADER)


def check_told(served: Served, rank: int) -> None:
    served.end()
    assert isinstance(served.error, ShardmarkError)
    assert {f"rank {rank}", f"worker {rank}"} & {str(served.error)[:n] for n in (6, 8)}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_invalid_headers_end_the_server(
    counting: Scene, header: tuple[float, float, float]
) -> None:
    with counting.served(None, **COUNTS) as served:
        say(counting, 1, *header)
        if header == NO_VALUE:
            with counting.network.being(1):
                send(torch.full((4,), 255, dtype=torch.uint8), counting.network.server)
        check_told(served, 1)


def test_second_gradient_of_a_step_ends_the_server(counting: Scene) -> None:
    with counting.served(0, **COUNTS) as served:
        counting.clients[0].push(*counting.constant(1.0))
        counting.clients[0].push(*counting.constant(1.0))
        check_told(served, 0)


@pytest.mark.parametrize("asked", [Kind.PULL, Kind.GRADIENTS])
def test_worker_that_leaves_ends_the_wait_for_its_gradients(counting: Scene, asked: Kind) -> None:
    with counting.served(0, **COUNTS) as served:
        counting.clients[0].push(*counting.constant(1.0))
        say(counting, 0, asked, 0, 0)
        counting.clients[1].close()
        check_told(served, 1)


@pytest.mark.parametrize("size_bytes", [-1, 0, 2**40])
def test_worker_refuses_invalid_sizes(counting: Scene, size_bytes: int) -> None:
    server = counting.network.server
    send_numbers([size_bytes], 0)
    with counting.network.being(0), pytest.raises(ShardmarkError, match=f"rank {server} sent"):
        WorkerGroup([server]).gather("mine")


def test_worker_refuses_values_that_are_no_list(counting: Scene) -> None:
    server, content = counting.network.server, to_bytes("no list")
    send_numbers([len(content)], 0)
    send(content, 0)
    with counting.network.being(0), pytest.raises(ShardmarkError, match=f"rank {server}"):
        WorkerGroup([server]).gather("mine")


@pytest.mark.parametrize("given", [(9, 0), (-2, 0), (0, 2), (0, -1)])
def test_worker_refuses_invalid_step_shards(counting: Scene, given: tuple[int, int]) -> None:
    server = counting.network.server
    send_numbers([*given], 0)
    with counting.network.being(0), pytest.raises(ShardmarkError, match=f"rank {server} sent"):
        receive_step_shard(server, end_step=9, workers=2)


WIDTHS = (3, 17, 8, 31, 5, 2)


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(WIDTHS)), nn.BatchNorm1d(2))


def names(partition: Partition) -> list[str]:
    return [segment.name for part in partition for bucket in part for segment in bucket.segments]


@pytest.mark.parametrize("servers", [1, 2, 5])
@pytest.mark.parametrize("bucket_bytes", [0, 600, 10**9])
def test_every_parameter_is_held_once_by_servers_balanced_by_bytes(
    servers: int, bucket_bytes: int
) -> None:
    """Buckets are views that vectorised kernels like, whatever the wire's precision."""
    made = model()
    partition, half = (
        partition_parameters(made, servers=servers, bucket_bytes=bucket_bytes, wire=wire)
        for wire in ("fp32", "bf16")
    )
    sizes = dict(made.named_parameters())
    assert len(partition) == servers
    assert sorted(names(partition)) == sorted(sizes)
    assert names(half) == names(partition)
    for bucket, in_bf16 in zip(sum(partition, ()), sum(half, ()), strict=True):
        ends = [0, *(segment.end for segment in bucket.segments)]
        starts = [-(-end // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS for end in ends[:-1]]
        assert [segment.start for segment in bucket.segments] == starts, "no overlap"
        assert bucket.elements == ends[-1]
        assert len(bucket.segments) == 1 or bucket.elements * 4 <= bucket_bytes
        assert (in_bf16.elements, in_bf16.wire_type) == (bucket.elements, torch.bfloat16)
        flat = bucket.flat(sizes)
        views = {segment.name: segment.view(flat) for segment in bucket.segments}
        assert all(view.data_ptr() % 64 == 0 for view in views.values())
        assert all(torch.equal(view, sizes[name]) for name, view in views.items())
        assert flat.abs().sum() == pytest.approx(sum(v.abs().sum().item() for v in views.values()))
    held = [4 * sum(bucket.elements for bucket in part) for part in partition]
    assert min(held) > 0
    padding = len(sizes) * ALIGNED_ELEMENTS
    assert max(held) <= sum(held) / servers + 4 * (max(p.numel() for p in sizes.values()) + padding)
    if servers == 1:
        assert names(partition) == [*sizes][::-1], "the last layers' gradients are ready first"


def test_bucket_holds_one_parameter_group() -> None:
    sizes = dict(model().named_parameters())
    flat = frozenset(name for name, p in sizes.items() if p.dim() < 2)
    groups = [ParameterGroup(names=names, options={}) for names in (frozenset(sizes) - flat, flat)]
    partition = partition_parameters(
        model(), servers=2, bucket_bytes=10**9, wire="fp32", groups=groups
    )
    assert sorted(names(partition)) == sorted(sizes)
    for part in partition:
        kinds = [{segment.name in flat for segment in bucket.segments} for bucket in part]
        assert kinds == [{False}, {True}]


def test_frozen_parameters_are_left_out_and_shared_ones_held_once() -> None:
    """The frozen stay with the workers; what two layers share is held once."""
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    made[1].weight = made[0].weight
    made[2].requires_grad_(False)
    partition = partition_parameters(made, servers=2, bucket_bytes=64, wire="fp32")
    assert sorted(names(partition)) == ["0.bias", "0.weight", "1.bias"]
    many = partition_parameters(made, servers=4, bucket_bytes=64, wire="fp32")
    assert [bool(part) for part in many] == [True] * 3 + [False], "the strategy refuses such"
