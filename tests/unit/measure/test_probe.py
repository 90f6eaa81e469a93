"""Exposed communication on made-up events, and the probe's steps on a tiny model."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import DeviceType

from shardmark.measure.step.recorder import Spans
from shardmark.strategies.step import EagerWorker
from shardmark.train import probe as probe_module
from shardmark.train.probe import exposed_communication_seconds, probe
from tests.unit.training.toy import CPU, ToyWorkload, recipe

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True, slots=True)
class Event:
    """As the profiler's: instants in milliseconds."""

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


def exposed_milliseconds(*events: Event, since: int = 0) -> float:
    results = SimpleNamespace(events=lambda: list(events))
    profiled: Any = SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))
    seconds = exposed_communication_seconds(profiled, since_nanoseconds=since * 10**6)
    return round(seconds * 1000, 6)


def kernel(name: str, start: int, end: int, kind: str = "kernel") -> Event:
    return Event(name, start, end, DeviceType.CUDA, kind)


def test_on_the_cpu_operators_hide_communication() -> None:
    assert (
        exposed_milliseconds(
            Event("gloo:all_reduce", 10, 30),
            Event("aten::mm", 0, 15),
            Event("aten::add", 20, 22),
            Event("python function", 0, 100),
            Event("[memory]", 5, 5),
        )
        == (30 - 15) - 2
    )


def test_overlapping_communication_counts_once() -> None:
    events = Event("gloo:all_gather", 0, 10), Event("c10d::allgather_", 5, 12)
    assert exposed_milliseconds(*events) == 12


def test_what_came_before_the_instant_is_left_out() -> None:
    events = Event("gloo:a", 0, 10), Event("aten::mm", 20, 24), Event("gloo:b", 22, 30)
    assert exposed_milliseconds(*events, since=15) == 6


def test_on_a_device_its_kernels_count_alone() -> None:
    """Host operators and annotations that span others' work hide nothing."""
    assert (
        exposed_milliseconds(
            kernel("ncclDevKernel_AllReduce_Sum_f32", 10, 30),
            kernel("gemm", 12, 20),
            kernel("Memcpy HtoD", 28, 40, "gpu_memcpy"),
            kernel("nccl:all_reduce", 0, 100, "gpu_user_annotation"),
            Event("aten::mm", 0, 100),
            Event("c10d::allreduce_", 0, 100),
        )
        == 20 - 8 - 2
    )


def test_without_communication_nothing_is_exposed() -> None:
    assert exposed_milliseconds(Event("aten::mm", 0, 100)) == 0
    assert exposed_milliseconds() == 0


def worker_and_step() -> tuple[EagerWorker, Any]:
    workload = ToyWorkload()
    model = workload.build_model()
    worker = EagerWorker(model=model, module=model, workload=workload, recipe=recipe(), device=CPU)

    def take_step(spans: Spans) -> object:
        return worker.step(workload.batch(range(8)), spans)

    return worker, take_step


def test_probe_of_one_device() -> None:
    """58 parameters, as many gradients, as much momentum; no other rank."""
    worker, take_step = worker_and_step()
    record = probe(worker, take_step, CPU)
    assert record.parameter_bytes == record.gradient_bytes == 58 * 4
    assert record.collectives == {}
    assert record.exposed_communication_seconds == 0
    assert record.reasons == {}
    assert record.peak_memory_bytes is not None
    assert record.peak_memory_bytes >= 3 * 58 * 4


def test_failing_profiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: object) -> None:
        raise RuntimeError("no kineto")

    monkeypatch.setattr(probe_module, "profile", fails)
    worker, take_step = worker_and_step()
    record = probe(worker, take_step, torch.device("cpu"))
    why = "the profiler failed: no kineto"
    assert record.reasons == {"peak_memory_bytes": why, "exposed_communication_seconds": why}
    assert (record.peak_memory_bytes, record.exposed_communication_seconds) == (None, None)
    assert record.parameter_bytes == 58 * 4
