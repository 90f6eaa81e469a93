"""Exposed communication on made-up events, held state, collectives, and the probe's steps."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch._C._autograd import DeviceType

from shardmark.base.results.schema import CollectiveRecord
from shardmark.ranks.measure.step.collectives import FUNCTIONAL, KINDS, CollectiveCounter
from shardmark.ranks.strategies.base import HeldState
from shardmark.ranks.strategies.step import EagerWorker
from shardmark.ranks.train import probe as probe_module
from shardmark.ranks.train.probe import HeldSpans, exposed_communication_seconds, held_bytes, probe
from tests.unit.ranks.train.toy import CPU, FakeWorker, ToyWorkload, recipe


@dataclass(frozen=True, slots=True)
class Event:
    """An event like the profiler's: instants in milliseconds."""

    text: str
    start: int
    end: int
    device: Any = DeviceType.CPU
    kind: str = "cpu_op"

    def name(self) -> str:
        return self.text

    def start_ns(self) -> int:
        return self.start * 10**6

    def duration_ns(self) -> int:
        return (self.end - self.start) * 10**6

    def device_type(self) -> Any:
        return self.device

    def activity_type(self) -> str:
        return self.kind


def exposed_milliseconds(*events: Event, since: int = 0, on_cpu: bool) -> float | None:
    results = SimpleNamespace(events=lambda: list(events))
    profiled: Any = SimpleNamespace(kineto_results=results)
    seconds = exposed_communication_seconds(
        profiled, since_nanoseconds=since * 10**6, on_cpu=on_cpu
    )
    return None if seconds is None else round(seconds * 1000, 6)


def kernel(name: str, start: int, end: int, kind: str = "kernel") -> Event:
    return Event(name, start, end, DeviceType.CUDA, kind)


CPU_EVENTS = (
    Event("gloo:all_reduce", 10, 30),
    Event("aten::mm", 0, 15),
    Event("aten::add", 20, 22),
    Event("python function", 0, 100),
    Event("[memory]", 5, 5),
)
# Host operators and annotations that span others' work hide nothing.
CUDA_EVENTS = (
    kernel("ncclDevKernel_AllReduce_Sum_f32", 10, 30),
    kernel("gemm", 12, 20),
    kernel("Memcpy HtoD", 28, 40, "gpu_memcpy"),
    kernel("nccl:all_reduce", 0, 100, "gpu_user_annotation"),
    Event("aten::mm", 0, 100),
    Event("c10d::allreduce_", 0, 100),
)


# A parameter server's messages pass through the host while the GPU may compute.
SERVER_EVENTS = (
    kernel("gemm", 0, 20),
    kernel("Memcpy DtoH", 20, 25, "gpu_memcpy"),
    Event("aten::mm", 0, 200),
    Event("gloo:send", 15, 40),
    Event("c10d::recv_", 40, 60),
    kernel("Memcpy HtoD", 55, 70, "gpu_memcpy"),
)


@pytest.mark.parametrize(
    ("events", "since", "on_cpu", "exposed"),
    [
        (CPU_EVENTS, 0, True, (30 - 15) - 2),
        ((Event("gloo:all_gather", 0, 10), Event("c10d::allgather_", 5, 12)), 0, True, 12),
        ((Event("gloo:a", 0, 10), Event("aten::mm", 20, 24), Event("gloo:b", 22, 30)), 15, True, 6),
        ((), 0, True, 0),
        (CUDA_EVENTS, 0, False, 20 - 8 - 2),
        # Beside NCCL, gloo's work counts, and what calls NCCL does not.
        ((*CUDA_EVENTS, Event("gloo:all_reduce", 50, 53)), 0, False, 20 - 8 - 2 + 3),
        (SERVER_EVENTS, 0, False, 55 - 25),
        ((kernel("gemm", 0, 20),), 0, False, 0),
        ((*SERVER_EVENTS,), 90, False, None),
    ],
)
def test_communication_without_computation_is_exposed(
    events: tuple[Event, ...], since: int, on_cpu: bool, exposed: float | None
) -> None:
    assert exposed_milliseconds(*events, since=since, on_cpu=on_cpu) == exposed


def test_kernels_are_recognised_without_activity_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 has no `activity_type`: on an H100, every trial failed."""
    monkeypatch.delattr(Event, "activity_type")
    annotates = lambda event: "annotation" in event.kind  # noqa: E731
    monkeypatch.setattr(Event, "is_user_annotation", annotates, raising=False)
    assert exposed_milliseconds(*CUDA_EVENTS, on_cpu=False) == 20 - 8 - 2


@pytest.mark.parametrize("fails", [False, True])
def test_probe_measures_state_of_one_device(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """58 parameters, as many gradients, as much momentum; no other rank."""
    if fails:
        monkeypatch.setattr(probe_module, "profile", MagicMock(side_effect=RuntimeError("no")))
    workload = ToyWorkload()
    model = workload.build_model()
    worker = EagerWorker(model, workload=workload, recipe=recipe(), device=CPU, shares=1)
    batch = workload.batch(range(8))
    record = probe(worker, lambda spans: worker.step(batch, spans), CPU)
    assert record.parameter_bytes == record.gradient_bytes == 58 * 4
    assert record.collectives == {}
    if fails:
        assert set(record.reasons) == {"peak_memory_bytes", "exposed_communication_seconds"}
        assert set(record.reasons.values()) == {"the profiler failed: no"}
        assert (record.peak_memory_bytes, record.exposed_communication_seconds) == (None, None)
    else:
        assert (record.exposed_communication_seconds, record.reasons) == (0, {})
        assert record.peak_memory_bytes is not None
        assert record.peak_memory_bytes >= 3 * 58 * 4


class Holding(FakeWorker):
    """Holds most parameters before backward, most gradients before the update."""

    def __init__(self) -> None:
        super().__init__()
        shared, moments = torch.zeros(5), torch.zeros(2)
        self.states = [
            HeldState(
                parameters=(shared, torch.zeros(4)),
                gradients=(shared[1:],),  # a view: it counts as parameters
                optimizer_state=(moments, shared),
            ),
            HeldState(
                parameters=(torch.zeros(4),),
                gradients=(torch.zeros(4),),
                optimizer_state=(moments,),
                untracked_bytes=8,
            ),
        ]

    def held_state(self) -> HeldState:
        return self.states.pop(0)


def test_held_spans_record_the_largest_value_of_each_kind() -> None:
    spans = HeldSpans(Holding(), CPU)
    for name in ("forward", "backward", "optimizer"):
        with spans.span(name):
            pass
    assert spans.largest == {
        "parameter_bytes": 36,
        "gradient_bytes": 24,
        "optimizer_state_bytes": 8,
    }


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of a given number of bytes on a device that need not exist."""

    device: torch.device
    nbytes: int
    is_sparse = False

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=lambda: id(self), nbytes=lambda: self.nbytes)


def test_host_state_of_a_gpu_is_counted_separately() -> None:
    """Offloaded state and a server's pinned boxes are not in the GPU's memory."""
    gpu = torch.device("cuda", 1)
    held: Any = HeldState(
        parameters=(Held(gpu, 5), Held(CPU, 100)),  # type: ignore[arg-type]
        gradients=(Held(gpu, 7),),  # type: ignore[arg-type]
        optimizer_state=(Held(CPU, 200),),  # type: ignore[arg-type]
        untracked_bytes=2,
    )
    assert held_bytes(held, gpu) == {
        "parameter_bytes": 5,
        "gradient_bytes": 9,
        "optimizer_state_bytes": 0,
        "host_state_bytes": 300,
    }
    assert held_bytes(held, CPU) == {
        "parameter_bytes": 100,
        "gradient_bytes": 2,
        "optimizer_state_bytes": 200,
    }


def test_collectives_and_the_bytes_of_their_input_are_counted() -> None:
    counter = CollectiveCounter()
    large, small = torch.zeros(8), torch.zeros(2, dtype=torch.bfloat16)

    def call(name: str, *args: Any) -> None:
        operator = MagicMock(__str__=lambda _: name)
        counter.__torch_dispatch__(operator, (), args, {"x": 1})
        operator.assert_called_once_with(*args, x=1)

    call("c10d.allreduce_.default", [large, small], "group")
    call("c10d._allgather_base_.default", large, small, "group")
    call("c10d.reduce_scatter_.default", [small], [[large, large]], "group")
    call("c10d.monitored_barrier_.default", "group")
    call("aten.add.Tensor", large, large)
    assert counter.probe_fields()["collectives"] == {
        "all_reduce": CollectiveRecord(calls=1, payload_bytes=32 + 4),
        "all_gather": CollectiveRecord(calls=1, payload_bytes=4),
        "reduce_scatter": CollectiveRecord(calls=1, payload_bytes=64),
        "monitored_barrier": CollectiveRecord(calls=1, payload_bytes=0),
    }


def test_collectives_are_counted_by_phase_and_shared_by_the_steps_of_a_round() -> None:
    """The innermost span decides: a schedule of a pipeline has passes in it."""
    counter = CollectiveCounter()
    operator = MagicMock(__str__=lambda _: "c10d.allreduce_.default")

    def call(*spans: str) -> None:
        with ExitStack() as stack:
            for name in spans:
                stack.enter_context(counter.span(name))
            counter.__torch_dispatch__(operator, (), ([torch.zeros(4)],))

    for spans in (("pipeline", "backward"), ("pipeline",), ("optimizer",), ("optimizer",), ()):
        call(*spans)
    fields = counter.probe_fields(steps=2)
    calls = {
        phase: {kind: (record.calls, record.payload_bytes) for kind, record in kinds.items()}
        for phase, kinds in fields["collectives_by_phase"].items()
    }
    assert calls == {
        "backward": {"all_reduce": (0.5, 8)},
        "other": {"all_reduce": (1, 16)},
        "update": {"all_reduce": (1, 16)},
    }
    total = fields["collectives"]["all_reduce"]
    assert (total.calls, total.payload_bytes) == (2.5, 40)


@pytest.mark.canary
def test_every_operator_in_the_table_is_torch_s() -> None:
    """A name that torch does not know (any more) would never be counted."""
    import torch.distributed  # registers them

    assert torch.distributed.is_available()
    names: list[str] = torch._C._dispatch_get_all_op_names()
    parts = (name.partition("::") for name in names)
    known = {n.partition(".")[0] for space, _, n in parts if space in {"c10d", *FUNCTIONAL}}
    assert set(KINDS) <= known
