"""A single server: its updates from gradients, and the workers that it waits for, alive or dead."""

from __future__ import annotations

import threading

import pytest
import torch

from shardmark.base.errors import ShardmarkError
from shardmark.extras.parameter_server.messages import Kind
from tests.unit.extras.parameter_server.network import COUNTS, Scene

MOMENTUM = {"name": "sgd", "lr": 1.0, "momentum": 0.5}
ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1}


def test_messages_are_rounded_and_parameters_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, draw = Scene(monkeypatch, workers=1, wire="bf16"), torch.Generator().manual_seed(3)
    (client,) = scene.clients
    with scene.served(None, optimizer=MOMENTUM):
        before = client.asked(Kind.PARAMETERS)
        assert not any(flat.any() for flat in client.state(1)[0]), "before the first update"
        assert not any(flat.any() for flat in client.asked(Kind.GRADIENTS))
        sent = [flat.bfloat16() for flat in scene.drawn(draw)]
        client.push(*sent)
        pulled = client.pull()
        after = client.asked(Kind.PARAMETERS)
    for was, gradient, now, travelled in zip(before, sent, after, pulled, strict=True):
        assert torch.equal(now, was - gradient.float())
        assert torch.equal(travelled, now.bfloat16())
        assert not torch.equal(travelled.float(), now)


def test_every_push_is_applied_once_and_its_staleness_counted(counting: Scene) -> None:
    first, second = counting.clients
    steps = (
        (first, False),  # staleness 0
        (second, True),  # 1: the first one's push came between
        (second, False),  # 0
        (second, True),  # 1: it has not pulled since
        (first, True),  # 4: on the initial parameters still
        (first, False),  # 0
    )
    with counting.served(None, **COUNTS) as served:
        for updates, (client, pulls) in enumerate(steps, start=1):
            client.push(*counting.constant(-1.0))
            assert float(client.asked(Kind.PARAMETERS)[0][0]) == updates
            if pulls:
                assert float(client.pull()[0][0]) == updates
        counting.meet()
        first.push(*counting.constant(1.0))  # the probe's: after the last meeting
        first.pull()
    record = served.server.exchange()
    assert record.staleness == {"0": 3, "1": 2, "4": 1}
    assert (record.updates, record.pushes, record.pulls) == (6, 6, 3)
    size = sum(bucket.elements * bucket.wire_type.itemsize for bucket in counting.buckets)
    assert record.received_bytes == {"0": 3 * size, "1": 3 * size}
    assert record.sent_bytes == {"0": size, "1": 2 * size}


def test_barrier_waits_for_all_gradients(counting: Scene) -> None:
    first, second = counting.clients
    with counting.served(0, **COUNTS) as served:
        first.push(*counting.constant(-1.0))
        first.ask_for_parameters()
        second.push(*counting.constant(-3.0))
        assert float(first.pulled()[0][0]) == float(second.pull()[0][0]) == 2.0
        counting.meet()
    record = served.server.exchange()
    assert (record.staleness, record.updates, record.pushes) == ({"0": 2}, 1, 2)
    assert record.wait_seconds > 0


def test_bound_makes_the_fast_worker_wait(counting: Scene) -> None:
    """The last parameters that it gets contain the slow worker's gradient, which came later."""
    fast, slow = counting.clients
    with counting.served(1, **COUNTS):
        fast.push(*counting.constant(-1.0))
        assert float(fast.pull()[0][0]) == 1.0
        fast.push(*counting.constant(-1.0))
        fast.ask_for_parameters()
        slow.push(*counting.constant(-1.0))
        assert float(fast.pulled()[0][0]) == 3.0


def test_held_bytes_of_a_server_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """58 parameters of 4 bytes: themselves, two moments, a mean, an inbox for each worker."""
    scene = Scene(monkeypatch, workers=2)
    with scene.served(0, optimizer=ADAMW) as served:
        for client in scene.clients:
            client.push(*scene.constant(1.0))
        scene.clients[0].pull()
    state = served.server.held_state()
    assert sum(p.nbytes for p in state.parameters) == 58 * 4
    moments = [tensor for tensor in state.optimizer_state if tensor.dim()]
    assert sum(tensor.nbytes for tensor in moments) == 2 * 58 * 4
    counters = sum(tensor.nbytes for tensor in state.optimizer_state if not tensor.dim())
    assert served.server.held_bytes() == (1 + 2 + 1 + 2) * 58 * 4 + counters


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
