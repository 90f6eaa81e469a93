"""Gradients leave in order, whole, once a step; the worker gets back what the servers hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardmark.measure.step.recorder import NoSpans
from shardmark.strategies.parameter_server.buckets import Partition, partition_parameters
from shardmark.strategies.parameter_server.messages import CONTENT, HEADER, Kind
from shardmark.strategies.parameter_server.server import GradientServer
from shardmark.strategies.parameter_server.worker import GradientSender, PushPullWorker
from tests.unit.strategies.network import Network, Served
from tests.unit.training.toy import CPU, ToyWorkload, plain, recipe

FIRST_SERVER = 2
INPUTS = torch.arange(12.0).view(3, 4) / 12


class Unused(nn.Module):
    """One layer is never asked."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.last(self.first(inputs))
        return found


class Pushed:
    """A model whose gradients are pushed into a network where nobody listens."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        build: Callable[[], nn.Module] = plain,
        *,
        servers: int = 1,
        wire: str = "fp32",
        early: bool = True,
    ) -> None:
        self.network = Network(server=0).installed(patch)
        self.model = build()
        self.partition: Partition = partition_parameters(
            self.model, servers=servers, bucket_bytes=40, wire=wire
        )
        self.pushing = GradientSender(
            self.model, self.partition, first_server=FIRST_SERVER, device=CPU, early=early
        )

    def backward(self, *, last: bool = True) -> None:
        self.pushing.last_pass(last)
        self.model(INPUTS).square().sum().backward()

    def contents(self, server: int = FIRST_SERVER) -> list[Tensor]:
        return [t for _, to, tag, t in self.network.log if (to, tag) == (server, CONTENT)]

    def by_name(self) -> dict[str, Tensor]:
        """What arrived, of every parameter."""
        found: dict[str, Tensor] = {}
        for index, part in enumerate(self.partition):
            flats = self.contents(FIRST_SERVER + index)[-len(part) :]
            for bucket, flat in zip(part, flats, strict=True):
                found |= {segment.name: segment.of(flat) for segment in bucket.segments}
        return found


def gradients(model: nn.Module, passes: int = 1) -> dict[str, Tensor]:
    """As torch leaves them; zero where it leaves none."""
    for parameter in model.parameters():
        parameter.grad = None
    for _ in range(passes):
        model(INPUTS).square().sum().backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("early", [True, False])
def test_all_gradients_arrive_in_the_order_of_the_buckets(
    monkeypatch: pytest.MonkeyPatch, servers: int, early: bool
) -> None:
    pushed = Pushed(monkeypatch, servers=servers, early=early)
    pushed.pushing.begin(rate=0.25)
    pushed.backward()
    pushed.pushing.end()
    expected = gradients(pushed.model)
    assert_equal(pushed.by_name(), expected)
    for index, part in enumerate(pushed.partition):
        server = FIRST_SERVER + index
        mine = [(tag, content) for _, to, tag, content in pushed.network.log if to == server]
        assert mine[0][1].tolist() == [Kind.PUSH, 0, 0.25], "the header goes first"
        assert [tag for tag, _ in mine] == [HEADER, *[CONTENT] * len(part)]
        assert [len(content) for _, content in mine[1:]] == [b.elements for b in part]
        assert pushed.pushing.sent_bytes[str(server)] == sum(b.wire_bytes for b in part)
    assert pushed.pushing.pushes == 1


def test_buckets_leave_during_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = Pushed(monkeypatch)
    assert len(pushed.partition[0]) > 2
    sent_before_the_first_layer: list[int] = []
    pushed.model.get_submodule("1").register_full_backward_hook(
        lambda *_: sent_before_the_first_layer.append(len(pushed.contents()))
    )
    pushed.pushing.begin(0.1)
    pushed.backward()
    assert len(pushed.contents()) == len(pushed.partition[0])
    assert 0 < sent_before_the_first_layer[0] < len(pushed.partition[0])
    pushed.pushing.end()
    assert len(pushed.contents()) == len(pushed.partition[0]), "nothing is sent twice"


def test_nothing_leaves_early_where_all_of_it_must_be_seen_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gradient that is clipped by itself."""
    pushed = Pushed(monkeypatch, early=False)
    pushed.pushing.begin(0.1)
    pushed.backward()
    assert pushed.network.log == []
    nn.utils.clip_grad_norm_(pushed.model.parameters(), 0.01)
    pushed.pushing.end()
    norm = torch.cat([t.flatten() for t in pushed.by_name().values()]).norm()
    torch.testing.assert_close(norm, torch.tensor(0.01))


@pytest.mark.parametrize("early", [True, False])
def test_unused_parameters_are_zeros(monkeypatch: pytest.MonkeyPatch, early: bool) -> None:
    """They hold back what comes after them until the end, and nothing is left out."""
    pushed = Pushed(monkeypatch, Unused, early=early)
    for _ in range(2):
        pushed.pushing.begin(0.1)
        pushed.backward()
        pushed.pushing.end()
    assert_equal(pushed.by_name(), gradients(pushed.model))
    assert not pushed.by_name()["unused.weight"].any()
    assert pushed.network.kinds(0) == [Kind.PUSH, Kind.PUSH]


def test_accumulated_gradients_leave_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = Pushed(monkeypatch)
    pushed.pushing.begin(0.1)
    for _ in range(2):
        pushed.backward(last=False)
        assert pushed.network.log == []
    pushed.backward()
    pushed.pushing.end()
    assert_equal(pushed.by_name(), gradients(pushed.model, passes=3))
    assert pushed.network.kinds(0) == [Kind.PUSH]


def test_every_step_begins_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = Pushed(monkeypatch)
    for _ in range(3):
        pushed.pushing.begin(0.1)
        pushed.backward()
        pushed.pushing.end()
    assert_equal(pushed.by_name(), gradients(pushed.model))
    assert pushed.pushing.pushes == 3


def test_half_the_bytes_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = Pushed(monkeypatch, wire="bf16")
    pushed.pushing.begin(0.1)
    pushed.backward()
    pushed.pushing.end()
    expected = {name: t.bfloat16() for name, t in gradients(pushed.model).items()}
    assert_equal(pushed.by_name(), expected)
    assert sum(pushed.pushing.sent_bytes.values()) == 58 * 2
    assert sum(flat.nbytes for flat in pushed.pushing.gradients) == 58 * 4


def frozen() -> nn.Module:
    model = plain()
    model.get_submodule("0").requires_grad_(False)
    return model


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("build", [plain, frozen])
def test_a_worker_and_its_server_train_as_torch_does(
    monkeypatch: pytest.MonkeyPatch, wire: str, build: Callable[[], nn.Module]
) -> None:
    workload, asked = ToyWorkload(build), recipe(gradient_accumulation=2)
    network = Network(server=1).installed(monkeypatch)
    model = workload.build_model()
    partition = partition_parameters(model, servers=1, bucket_bytes=100, wire=wire)
    server = GradientServer(
        model,
        partition[0],
        recipe=asked,
        workers=1,
        bound=0,
        tolerates_worker_loss=False,
        norm_group=None,
    )
    worker = PushPullWorker(
        model, partition, workload=workload, recipe=asked, device=CPU, workers=1, bound=0
    )
    alone = workload.build_model()
    optimizer = torch.optim.SGD(
        [p for p in alone.parameters() if p.requires_grad], lr=0.1, momentum=0.9, weight_decay=0.01
    )
    with Served(server, network, workers=1), network.being(0):
        worker.group.barrier()
        for step in range(3):
            batch = workload.batch(range(8 * step, 8 * step + 8))
            loss = worker.step(batch, NoSpans())
            optimizer.zero_grad()
            expected = workload.loss(alone, batch)
            expected.backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()
            rough = wire == "bf16"
            torch.testing.assert_close(
                loss, expected.detach(), rtol=0.02 if rough else 1e-5, atol=0
            )
        held = worker.full_parameters()
        assert list(held) == [name for name, _ in alone.named_parameters()]
        for name, parameter in alone.named_parameters():
            tolerance = 0.02 if wire == "bf16" else 1e-6
            torch.testing.assert_close(held[name], parameter.detach(), rtol=0, atol=tolerance)
        assert worker.group.gather("here") == ["here"]
        trained = {name for name, p in alone.named_parameters() if p.requires_grad}
        assert worker.full_optimizer_state().keys() == trained
        assert worker.full_gradients().keys() == trained
        record = worker.exchange()
        worker.close()
    width = 2 if wire == "bf16" else 4
    elements = sum(p.numel() for p in alone.parameters() if p.requires_grad)
    assert (record.pushes, record.pulls) == (3, 3)
    assert record.sent_bytes == record.received_bytes == {"1": 3 * width * elements}
    assert server.exchange().received_bytes == {"0": 3 * width * elements}
