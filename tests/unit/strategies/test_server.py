"""One server by itself: what it makes of gradients, and whom it waits for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardmark.strategies.parameter_server.messages import Kind
from shardmark.strategies.step import build_optimizer, state_keys
from tests.unit.strategies.network import COUNTS, Scene
from tests.unit.training.toy import assert_same, plain, recipe

MOMENTUM = {"name": "sgd", "lr": 1.0, "momentum": 0.5}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "lr": 0.1},
    "momentum": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "adam": {"name": "adam", "lr": 0.01, "weight_decay": 0.1},
    "adamw": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1},
}


@pytest.mark.parametrize(
    ("optimizer", "clipping"), [("sgd", None), ("momentum", 0.5), ("adam", 1e6), ("adamw", 0.5)]
)
def test_synchronous_update_equals_torch_s_step_on_the_mean(
    monkeypatch: pytest.MonkeyPatch, optimizer: str, clipping: float | None
) -> None:
    """Optimizer and clipping see flat buckets and do what they do to separate parameters."""
    scene, draw = Scene(monkeypatch, workers=3), torch.Generator().manual_seed(3)
    changes: dict[str, Any] = {
        "optimizer": OPTIMIZERS[optimizer],
        "gradient_clipping": clipping,
    }
    asked = recipe(**changes)
    with scene.served(0, **changes):
        alone = plain()
        alone.load_state_dict(scene.model.state_dict())
        reference = build_optimizer(dict(alone.named_parameters()), asked)
        for rate in (0.1, 0.1, 0.05):
            drawn = [scene.drawn(draw) for _ in scene.clients]
            means = [torch.stack(flats).mean(0) for flats in zip(*drawn, strict=True)]
            for name, parameter in alone.named_parameters():
                parameter.grad = scene.by_name(means)[name].clone()
            for client, flats in zip(scene.clients, drawn, strict=True):
                client.push(*flats, rate=rate)
            given = scene.by_name(scene.clients[0].asked(Kind.GRADIENTS))
            assert_same(given, scene.by_name(means))
            if clipping is not None:
                nn.utils.clip_grad_norm_(alone.parameters(), clipping)
            reference.param_groups[0]["lr"] = rate
            reference.step()
            expected = dict(alone.named_parameters())
            for client in scene.clients:
                assert_same(scene.by_name(client.pull()), expected)
        assert_same(scene.by_name(scene.clients[1].asked(Kind.PARAMETERS)), expected)
        keys = state_keys(asked.optimizer)
        for key, flats in zip(keys, scene.clients[2].state(len(keys)), strict=True):
            state = {name: reference.state[p][key] for name, p in alone.named_parameters()}
            assert_same(scene.by_name(flats), state)


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
    size = sum(bucket.wire_bytes for bucket in counting.buckets)
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


def test_the_bound_holds_the_fast_worker_back(counting: Scene) -> None:
    """What it gets at last contains the slow one's gradient, which came after its own."""
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
    with scene.served(0, optimizer=OPTIMIZERS["adamw"]) as served:
        for client in scene.clients:
            client.push(*scene.constant(1.0))
        scene.clients[0].pull()
    state = served.server.held_state()
    assert sum(p.nbytes for p in state.parameters) == 58 * 4
    moments = [tensor for tensor in state.optimizer_state if tensor.dim()]
    assert sum(tensor.nbytes for tensor in moments) == 2 * 58 * 4
    counters = sum(tensor.nbytes for tensor in state.optimizer_state if not tensor.dim())
    assert served.server.held_bytes() == (1 + 2 + 1 + 2) * 58 * 4 + counters
