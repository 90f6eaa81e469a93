"""A server ends with an error when a worker dies."""

from __future__ import annotations

import threading

import pytest

from shardmark.base.errors import ShardmarkError
from tests.unit.extras.parameter_server.network import COUNTS, Scene


@pytest.mark.parametrize("bound", [0, 1, None])
@pytest.mark.parametrize("send_hangs", [False, True])
def test_death_of_a_worker_ends_the_server(
    counting: Scene, bound: int | None, send_hangs: bool
) -> None:
    """Also while a send to another worker never ends."""
    with counting.served(bound, **COUNTS) as served:
        if send_hangs:
            counting.network.dead[0] = threading.Event()
            counting.clients[0].ask_for_parameters()
        counting.network.dies(1)
        served.end()
    assert isinstance(served.error, ShardmarkError)
    assert str(served.error) == "worker 1 is gone; see log.txt"
