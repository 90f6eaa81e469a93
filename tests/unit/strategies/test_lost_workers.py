"""What one server does when workers die, or it fails itself."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from shardmark.core.errors import ShardmarkError
from shardmark.strategies.parameter_server.messages import Kind
from tests.unit.strategies.scene import COUNTS, Scene

if TYPE_CHECKING:
    import pytest


def test_the_others_train_on_without_who_is_lost(counting: Scene) -> None:
    first, second = counting.clients
    with counting.served(1, tolerates_worker_loss=True, global_batch=8, **COUNTS) as served:
        second.step_shard(9)
        second.step_shard(9)
        second.push(*counting.constant(-1.0))
        second.asked(Kind.PARAMETERS)
        counting.network.dies(1)
        for number in range(2, 6):
            first.push(*counting.constant(-1.0))
            assert float(first.pull()[0][0]) == number
        first.come("alone")
        assert first.met() == ["alone"]
        first.close()
        served.end()
    assert served.error is None
    assert served.server.exchange().lost_samples == 4
    assert served.server.exchange().updates == 5


def test_a_send_to_the_dead_that_never_ends_is_not_waited_for(counting: Scene) -> None:
    """gloo's does not: only a receive from the dead worker fails."""
    first, second = counting.clients
    with counting.served(1, tolerates_worker_loss=True, **COUNTS) as served:
        counting.network.dead[1] = threading.Event()
        second.ask_for_parameters()
        first.push(*counting.constant(-1.0))
        first.push(*counting.constant(-1.0))
        first.ask_for_parameters()  # held back by the bound
        counting.network.dies(1)
        assert float(first.pulled()[0][0]) == 2.0
        first.come("alone")
        assert first.met() == ["alone"]
        first.close()
        served.end()
    assert served.error is None


def test_where_all_are_needed_such_a_send_is_an_error_too(counting: Scene) -> None:
    with counting.served(0, tolerates_worker_loss=False, **COUNTS) as served:
        counting.network.dead[1] = threading.Event()
        counting.clients[1].ask_for_parameters()
        counting.network.dies(1)
        served.end()
    assert str(served.error) == "worker 1 is gone; see log.txt"


def test_half_a_push_is_none(counting: Scene) -> None:
    first, second = counting.clients
    with counting.served(None, tolerates_worker_loss=True, **COUNTS) as served:
        second.push(*counting.constant(-1.0)[:-1])
        counting.network.dies(1)
        first.come()
        first.met()
        assert float(first.asked(Kind.PARAMETERS)[0][0]) == 0.0
        first.close()
        served.end()
    assert served.server.exchange().pushes == 0


def test_all_lost_is_an_error(counting: Scene) -> None:
    with counting.served(None, tolerates_worker_loss=True) as served:
        counting.network.dies(0)
        counting.network.dies(1)
        served.end()
    assert isinstance(served.error, ShardmarkError)
    assert str(served.error) == "every worker is gone; see log.txt"


def test_where_all_are_needed_a_loss_is_an_error(counting: Scene) -> None:
    with counting.served(0, tolerates_worker_loss=False) as served:
        counting.clients[0].push(*counting.constant(1.0))
        counting.clients[0].ask_for_parameters()
        counting.network.dies(1)
        served.end()
        counting.clients[1].push(*counting.constant(1.0))
        with served.server._gate.changed:  # let the thread go that waits for the second's gradient
            served.server._averaged = 1
            served.server._gate.changed.notify_all()
    assert isinstance(served.error, ShardmarkError)
    assert str(served.error) == "worker 1 is gone; see log.txt"


def test_failure_of_an_answer_is_the_server_s(
    counting: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counting.served(None, tolerates_worker_loss=True, **COUNTS) as served:

        def fails() -> None:
            raise ValueError("the optimizer is broken")

        monkeypatch.setattr(served.server._optimizer, "step", fails)
        counting.clients[0].push(*counting.constant(1.0))
        served.end()
    assert isinstance(served.error, ValueError)
