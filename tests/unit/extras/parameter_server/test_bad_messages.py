"""No message of a rank ends the server with an error that does not name the rank."""

from __future__ import annotations

import math

import pytest
import torch

from shardmark.base.errors import ShardmarkError
from shardmark.extras.parameter_server.messages import (
    HEADER,
    Kind,
    receive_step_shard,
    send,
    send_numbers,
    to_bytes,
)
from shardmark.extras.parameter_server.worker import WorkerGroup
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
