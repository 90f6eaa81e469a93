"""Gradients leave in order, whole, once a step; the worker gets back what the servers hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from shardmark.base.errors import ShardmarkError
from shardmark.extras.parameter_server import messages
from shardmark.extras.parameter_server.messages import CONTENT, HEADER, Kind, partition_parameters
from shardmark.extras.parameter_server.server import GradientServer
from shardmark.extras.parameter_server.worker import GradientSender, PushPullWorker
from shardmark.ranks.measure.step.recorder import NoSpans
from tests.unit.extras.parameter_server.network import Network, Served
from tests.unit.ranks.train.toy import CPU, ToyWorkload, Unused, plain, recipe

FIRST_SERVER = 2
INPUTS = torch.arange(12.0).view(3, 4) / 12


class Sending:
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
        self.partition = partition_parameters(
            self.model, servers=servers, bucket_bytes=40, wire=wire
        )
        self.sender = GradientSender(
            self.model, self.partition, first_server=FIRST_SERVER, device=CPU, early=early
        )

    def step(self, passes: Sequence[bool] = (True,), rate: float = 0.1) -> None:
        """Each pass is told whether it is the last."""
        self.sender.begin(rate)
        for last in passes:
            self.sender.last_pass(last)
            before = len(self.network.log)
            self.model(INPUTS).square().sum().backward()
            assert last or len(self.network.log) == before
        self.sender.end()

    def contents(self, server: int = FIRST_SERVER) -> list[Tensor]:
        return [t for _, to, tag, t in self.network.log if (to, tag) == (server, CONTENT)]

    def by_name(self) -> dict[str, Tensor]:
        """The last value that arrived for every parameter."""
        arrived: dict[str, Tensor] = {}
        for index, part in enumerate(self.partition):
            flats = self.contents(FIRST_SERVER + index)[-len(part) :]
            for bucket, flat in zip(part, flats, strict=True):
                arrived |= {segment.name: segment.view(flat) for segment in bucket.segments}
        return arrived

    def assert_arrived(self, passes: int = 1, dtype: torch.dtype = torch.float32) -> None:
        """The gradients as torch leaves them; zero where it leaves none."""
        for parameter in self.model.parameters():
            parameter.grad = None
        for _ in range(passes):
            self.model(INPUTS).square().sum().backward()
        arrived = self.by_name()
        assert arrived.keys() == dict(self.model.named_parameters()).keys()
        for name, parameter in self.model.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert torch.equal(arrived[name], gradient.to(dtype)), name


@pytest.mark.parametrize("early", [True, False])
def test_buckets_leave_during_the_backward_pass_unless_all_must_be_seen_first(
    monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    """A gradient that is clipped by itself has to be seen whole."""
    sending = Sending(monkeypatch, early=early)
    buckets = len(sending.partition[0])
    before_the_first_layer: list[int] = []
    sending.model.get_submodule("1").register_full_backward_hook(
        lambda *_: before_the_first_layer.append(len(sending.contents()))
    )
    sending.sender.begin(0.1)
    sending.sender.last_pass(True)
    sending.model(INPUTS).square().sum().backward()
    assert len(sending.contents()) == (buckets if early else 0)
    assert (0 < before_the_first_layer[0] < buckets) is early
    if not early:
        nn.utils.clip_grad_norm_(sending.model.parameters(), 0.01)
    sending.sender.end()
    assert len(sending.contents()) == buckets, "nothing is sent twice"
    if not early:
        norm = torch.cat([t.flatten() for t in sending.by_name().values()]).norm()
        torch.testing.assert_close(norm, torch.tensor(0.01))


@pytest.mark.parametrize(
    ("servers", "early", "build", "passes", "wire"),
    [
        (1, True, plain, (True,), "fp32"),
        (2, False, plain, (False, False, True), "fp32"),
        (2, True, Unused, (False, False, True), "fp32"),
        (1, False, Unused, (True,), "bf16"),
    ],
)
def test_gradients_leave_once_a_step_in_the_order_of_the_buckets(
    monkeypatch: pytest.MonkeyPatch,
    *,
    servers: int,
    early: bool,
    build: Callable[[], nn.Module],
    passes: tuple[bool, ...],
    wire: str,
) -> None:
    """Unused parameters are zeros, and hold back what comes after them until the end."""
    sending = Sending(monkeypatch, build, servers=servers, wire=wire, early=early)
    for _ in range(3):
        sending.step(passes, rate=0.25)
    counts, width = sending.sender.counts, 4 if wire == "fp32" else 2
    assert sending.network.kinds(0) == [Kind.PUSH] * 3 * servers
    assert counts.pushes == 3
    for index, part in enumerate(sending.partition):
        server = FIRST_SERVER + index
        mine = [(tag, content) for _, to, tag, content in sending.network.log if to == server]
        assert mine[0][1].tolist() == [Kind.PUSH, 0, 0.25], "the header goes first"
        assert [tag for tag, _ in mine] == [HEADER, *[CONTENT] * len(part)] * 3
        assert [len(content) for _, content in mine[1 : len(part) + 1]] == [
            b.elements for b in part
        ]
        assert counts.sent_bytes[str(server)] == 3 * width * sum(b.elements for b in part)
    sending.assert_arrived(len(passes), {"fp32": torch.float32, "bf16": torch.bfloat16}[wire])


def frozen() -> nn.Module:
    model = plain()
    model.get_submodule("0").requires_grad_(False)
    return model


@pytest.mark.parametrize(("wire", "tolerance"), [("fp32", 1e-6), ("bf16", 0.02)])
@pytest.mark.parametrize(("build", "rate_factor"), [(plain, 1.0), (frozen, 1.0), (plain, 0.25)])
def test_a_worker_and_its_server_train_as_torch_does(
    monkeypatch: pytest.MonkeyPatch,
    wire: str,
    tolerance: float,
    build: Callable[[], nn.Module],
    rate_factor: float,
) -> None:
    workload, asked = ToyWorkload(build), recipe(gradient_accumulation=2)
    network = Network(server=1).installed(monkeypatch)
    model, alone = workload.build_model(), workload.build_model()
    partition = partition_parameters(model, servers=1, bucket_bytes=100, wire=wire)
    server = GradientServer(
        model,
        partition[0],
        recipe=asked,
        workers=1,
        bound=0,
        norm_group=None,
    )
    worker = PushPullWorker(
        model,
        partition=partition,
        workload=workload,
        recipe=asked,
        device=CPU,
        shares=1,
        bound=0,
        rate_factor=rate_factor,
    )
    trained = {name: p for name, p in alone.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(
        trained.values(), lr=0.1 * rate_factor, momentum=0.9, weight_decay=0.01
    )
    with Served(server, network, workers=1), network.being(0):
        worker.group.barrier()
        for step in range(3):
            batch = workload.batch(range(8 * step, 8 * step + 8))
            loss = worker.step(batch, NoSpans())
            optimizer.zero_grad()
            expected = workload.mean_loss(alone, batch)
            expected.backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()
            torch.testing.assert_close(loss, expected.detach(), rtol=10 * tolerance, atol=0)
        held = worker.full_parameters()
        assert list(held) == [name for name, _ in alone.named_parameters()]
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(held[name], parameter.detach(), rtol=0, atol=tolerance)
        assert worker.group.gather("here") == ["here"]
        assert worker.full_optimizer_state().keys() == trained.keys()
        assert worker.full_gradients().keys() == trained.keys()
        record = worker.exchange()
        worker.close()
    sent_bytes = 3 * {"fp32": 4, "bf16": 2}[wire] * sum(p.numel() for p in trained.values())
    assert (record.pushes, record.pulls) == (3, 3)
    assert record.sent_bytes == record.received_bytes == {"1": sent_bytes}
    assert server.exchange().received_bytes == {"0": sent_bytes}


@pytest.mark.parametrize(
    "talk",
    [
        lambda worker: worker.step(worker.workload.batch(range(8)), NoSpans()),
        lambda worker: next(worker.step_shards(1)),
        lambda worker: worker.group.barrier(),
        PushPullWorker.full_parameters,
        PushPullWorker.full_gradients,
        PushPullWorker.full_optimizer_state,
        PushPullWorker.close,
    ],
)
def test_every_exchange_names_a_server_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, talk: Callable[[PushPullWorker], object]
) -> None:
    workload = ToyWorkload(plain)
    model = workload.build_model()
    partition = partition_parameters(model, servers=1, bucket_bytes=100, wire="fp32")
    worker = PushPullWorker(
        model,
        partition=partition,
        workload=workload,
        recipe=recipe(),
        device=CPU,
        shares=1,
        bound=None,
    )

    def closed(*_: object, **__: object) -> None:
        raise RuntimeError("connection closed by peer")

    gone = SimpleNamespace(send=closed, isend=closed, recv=closed)
    monkeypatch.setattr(messages, "dist", gone)
    with pytest.raises(ShardmarkError, match="the parameter server, rank 1, is gone; see log"):
        talk(worker)
