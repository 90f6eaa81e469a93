"""Untimed steps after the training, which count what measuring would disturb."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._C._autograd import DeviceType  # exported under no public name
from torch.profiler import ProfilerActivity, profile

from shardmark.measure.memory.tensors import allocator_rise_bytes, live_tensor_bytes, storage_bytes
from shardmark.measure.step.collectives import CollectiveCounter
from shardmark.measure.step.recorder import NoSpans, Spans
from shardmark.results.schema import ProbeRecord
from shardmark.strategies.base import HeldState, Worker
from shardmark.workloads.base import Workload

if TYPE_CHECKING:
    from torch._C._autograd import _KinetoEvent

logger = logging.getLogger(__name__)

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")

TakeStep = Callable[[Spans], object]
"""Takes one more optimizer step, reporting its spans to the argument."""

Interval = tuple[int, int]
"""Start and end in nanoseconds; the end is outside."""


class HeldSpans:
    """Looks at the model state where a step holds most: before backward, before the update.

    Each kind keeps its larger value; storages shared between kinds count for the first of
    parameters, gradients, optimizer state.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.largest = {"parameter_bytes": 0, "gradient_bytes": 0, "optimizer_state_bytes": 0}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        if name in ("backward", "optimizer"):
            for kind, count in held_bytes(self._worker.held_state()).items():
                self.largest[kind] = max(self.largest[kind], count)
        yield


def held_bytes(state: HeldState) -> dict[str, int]:
    """Bytes by kind; what the library hides from Python are gradients (DDP's buckets)."""
    seen: set[int] = set()
    return {
        "parameter_bytes": storage_bytes(state.parameters, seen=seen),
        "gradient_bytes": storage_bytes(state.gradients, seen=seen) + state.untracked_bytes,
        "optimizer_state_bytes": storage_bytes(state.optimizer_state, seen=seen),
    }


def probe(worker: Worker, take_step: TakeStep, device: torch.device) -> ProbeRecord:
    """Four more steps: held state, collectives, and two under the profiler.  Collective."""
    held = HeldSpans(worker)
    take_step(held)
    with CollectiveCounter() as counter:
        take_step(NoSpans())
    peak, exposed, reasons = _profiled(worker, take_step, device)
    return ProbeRecord(
        **held.largest,
        peak_memory_bytes=peak,
        collectives=counter.counts,
        exposed_communication_seconds=exposed,
        reasons=reasons,
    )


def _profiled(
    worker: Worker, take_step: TakeStep, device: torch.device
) -> tuple[int | None, float | None, dict[str, str]]:
    """Peak bytes (CPU only), exposed communication seconds, and why either is missing."""
    on_cpu = device.type == "cpu"
    activities = [ProfilerActivity.CPU]
    if not on_cpu:
        activities.append(ProfilerActivity.CUDA)
    reasons = {} if on_cpu else {"peak_memory_bytes": "the CUDA allocator tells it"}
    try:
        with profile(activities=activities, profile_memory=on_cpu, acc_events=True) as profiled:
            take_step(NoSpans())
            level = live_tensor_bytes("cpu") + worker.held_state().untracked_bytes
            if not on_cpu:
                torch.cuda.synchronize(device)
            since = time.time_ns()
            take_step(NoSpans())
            if not on_cpu:
                torch.cuda.synchronize(device)
    except RuntimeError as error:
        logger.warning("the profiler failed", exc_info=True)
        why = f"the profiler failed: {error}"
        return None, None, {"peak_memory_bytes": why, "exposed_communication_seconds": why}
    peak = level + allocator_rise_bytes(profiled, since_nanoseconds=since) if on_cpu else None
    return peak, exposed_communication_seconds(profiled, since_nanoseconds=since), reasons


def exposed_communication_seconds(profiled: profile, *, since_nanoseconds: int) -> float:
    """Seconds after the instant in which communication ran and this rank computed nothing.

    CUDA: NCCL kernels outside all other kernels.  CPU: gloo's work and `c10d` calls outside all
    tensor operators.
    """
    assert profiled.profiler is not None
    results = profiled.profiler.kineto_results
    assert results is not None, "the profile has not ended"
    communication: dict[bool, list[Interval]] = {False: [], True: []}
    computation: dict[bool, list[Interval]] = {False: [], True: []}
    for event in results.events():
        if event.start_ns() < since_nanoseconds or event.name() == "[memory]":
            continue
        on_device = event.device_type() != DeviceType.CPU
        if on_device and not _is_work(event):
            continue  # an annotation that spans others' work
        name = event.name()
        interval = (event.start_ns(), event.start_ns() + event.duration_ns())
        if name.startswith(("gloo:", "c10d::", "nccl")):
            communication[on_device].append(interval)
        elif on_device or name.startswith("aten::"):
            computation[on_device].append(interval)
    device_worked = bool(communication[True] or computation[True])
    hidden_by = computation[device_worked]
    busy = covered_nanoseconds(chain(communication[device_worked], hidden_by))
    return (busy - covered_nanoseconds(hidden_by)) / 1e9


def _is_work(event: _KinetoEvent) -> bool:
    """Whether the device was busy; PyTorch before 2.12 tells annotations apart, no kinds."""
    if hasattr(event, "activity_type"):
        return event.activity_type() in DEVICE_WORK
    return not event.is_user_annotation()


def covered_nanoseconds(intervals: Iterable[Interval]) -> int:
    """How long at least one of the intervals lasts."""
    covered = last_end = 0
    for start, end in sorted(intervals):
        covered += max(0, end - max(start, last_end))
        last_end = max(last_end, end)
    return covered


def model_counts(workload: Workload, model: nn.Module) -> dict[str, int | None]:
    """What the workload's model has and does whatever the strategy."""
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "flops_per_sample": workload.sample_input_flops(model),
    }
