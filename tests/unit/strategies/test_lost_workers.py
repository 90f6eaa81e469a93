"""What one server does when workers die, or it fails itself."""

from __future__ import annotations

import threading

import pytest

from shardmark.core.errors import ShardmarkError
from shardmark.strategies.parameter_server.messages import Kind
from tests.unit.strategies.network import COUNTS, Client, Scene


def ends_alone(client: Client) -> None:
    client.come("alone")
    assert client.met() == ["alone"]
    client.close()


def test_the_others_train_on_without_who_is_lost(counting: Scene) -> None:
    first, second = counting.clients
    with counting.served(1, global_batch=8, **COUNTS) as served:
        second.step_shard(9)
        second.step_shard(9)
        second.push(*counting.constant(-1.0))
        second.asked(Kind.PARAMETERS)
        counting.network.dies(1)
        for number in range(2, 6):
            first.push(*counting.constant(-1.0))
            assert float(first.pull()[0][0]) == number
        ends_alone(first)
        served.end()
    assert served.error is None
    assert served.server.exchange().lost_samples == 4
    assert served.server.exchange().updates == 5


def test_a_send_to_the_dead_that_never_ends_is_not_waited_for(counting: Scene) -> None:
    """gloo's does not: only a receive from the dead worker fails."""
    first, second = counting.clients
    with counting.served(1, **COUNTS) as served:
        counting.network.dead[1] = threading.Event()
        second.ask_for_parameters()
        first.push(*counting.constant(-1.0))
        first.push(*counting.constant(-1.0))
        first.ask_for_parameters()  # held back by the bound
        counting.network.dies(1)
        assert float(first.pulled()[0][0]) == 2.0
        ends_alone(first)
        served.end()
    assert served.error is None


def test_half_a_push_is_none(counting: Scene) -> None:
    first, second = counting.clients
    with counting.served(None, **COUNTS) as served:
        second.push(*counting.constant(-1.0)[:-1])
        counting.network.dies(1)
        first.come()
        first.met()
        assert float(first.asked(Kind.PARAMETERS)[0][0]) == 0.0
        first.close()
        served.end()
    assert served.server.exchange().pushes == 0


@pytest.mark.parametrize(
    ("tolerates", "sends_hang", "dead", "told"),
    [
        (True, False, (0, 1), "every worker is gone; see log.txt"),
        (False, True, (1,), "worker 1 is gone; see log.txt"),
    ],
)
def test_a_loss_that_cannot_be_borne_is_an_error(
    counting: Scene, tolerates: bool, sends_hang: bool, dead: tuple[int, ...], told: str
) -> None:
    bound = None if tolerates else 0
    with counting.served(bound, **COUNTS) as served:
        if sends_hang:
            counting.network.dead[1] = threading.Event()
            counting.clients[1].ask_for_parameters()
        for rank in dead:
            counting.network.dies(rank)
        served.end()
    assert isinstance(served.error, ShardmarkError)
    assert str(served.error) == told
