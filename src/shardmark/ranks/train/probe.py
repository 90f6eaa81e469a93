"""Untimed steps after the training, which count what would disturb measured steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch._C._autograd import DeviceType  # exported under no public name
from torch.autograd.profiler import profile
from torch.nn.modules.batchnorm import _BatchNorm

from shardmark.base.recipe import Recipe
from shardmark.base.results.schema import ProbeRecord
from shardmark.base.traffic import frozen_element_bytes, matrix_shapes
from shardmark.ranks.measure.memory.tensors import (
    allocator_rise_bytes,
    is_on,
    live_tensor_bytes,
    storage_bytes,
)
from shardmark.ranks.measure.step.collectives import CollectiveCounter
from shardmark.ranks.measure.step.recorder import NoSpans, Spans
from shardmark.ranks.strategies.base import HeldState, Worker
from shardmark.ranks.strategies.blocks import checkpoint_blocks
from shardmark.ranks.workloads.base import Workload

if TYPE_CHECKING:
    from torch._C._autograd import _KinetoEvent

logger = logging.getLogger(__name__)

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
NO_KERNELS = "the profiler recorded no kernel of the GPU"

TakeStep = Callable[[Spans], object]
"""Takes one more optimizer step; the argument records its spans."""

Interval = tuple[int, int]
"""Half-open interval: start and end in nanoseconds."""


class HeldSpans:
    """Records the model state before backward and before the update, where a step holds most.

    The larger value of each kind counts.  A storage that several kinds share counts for the first
    of parameters, gradients and optimizer state.  `also` records the same spans.
    """

    def __init__(self, worker: Worker, device: torch.device, also: Spans | None = None) -> None:
        self._worker = worker
        self._device = device
        self._also = also or NoSpans()
        self.largest: dict[str, Any] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        if name in ("backward", "optimizer"):
            for kind, count in held_bytes(self._worker.held_state(), self._device).items():
                self.largest[kind] = max(self.largest.get(kind, 0), count)
        with self._also.span(name):
            yield


def held_bytes(state: HeldState, device: torch.device) -> dict[str, Any]:
    """Return the bytes of each kind on the device, and of all kinds on the host beside a GPU.

    Tensors that a library hides from Python count as gradients (DDP's buckets).
    """
    kinds = {
        "parameter_bytes": state.parameters,
        "gradient_bytes": state.gradients,
        "optimizer_state_bytes": state.optimizer_state,
    }
    seen: set[int] = set()
    state_bytes = {
        kind: storage_bytes((t for t in tensors if is_on(device.type, t)), seen=seen)
        for kind, tensors in kinds.items()
    }
    state_bytes["gradient_bytes"] += state.untracked_bytes
    if device.type != "cpu":
        everything = chain.from_iterable(kinds.values())
        state_bytes["host_state_bytes"] = storage_bytes(t for t in everything if is_on("cpu", t))
    return state_bytes


def probe(worker: Worker, take_step: TakeStep, device: torch.device) -> ProbeRecord:
    """Take a step for held state and collectives, and two under the profiler.  Collective.

    If the ranks communicate once in a round of several steps, each of these steps ends a round, and
    counts and seconds of communication are divided by the steps of a round.
    """
    steps = worker.round_steps()
    worker.end_rounds()
    with CollectiveCounter() as counter:
        take_step(spans := HeldSpans(worker, device, also=counter))
    peak, exposed, reasons = _profiled(worker, take_step, device)
    return ProbeRecord(
        **spans.largest,
        trained_matrices=(),  # `model_counts` adds them
        peak_memory_bytes=peak,
        **counter.probe_fields(steps),
        exposed_communication_seconds=None if exposed is None else exposed / steps,
        reasons=reasons,
    )


Profiled = tuple[int | None, float | None, dict[str, str]]
"""Peak bytes (CPU only), exposed communication seconds, and why either is missing."""


def _profiled(worker: Worker, take_step: TakeStep, device: torch.device) -> Profiled:
    """Take two steps under the profiler."""
    stages = profile_two_steps(device, lambda: worker.held_state().untracked_bytes)
    try:
        next(stages)
        while True:
            try:
                take_step(NoSpans())
            except RuntimeError as error:
                stages.throw(error)
            next(stages)
    except StopIteration as end:
        return cast("Profiled", end.value)


def profile_two_steps(
    device: torch.device, untracked_bytes: Callable[[], int] = lambda: 0
) -> Generator[None, None, Profiled]:
    """Profile two steps, each of which is taken while the generator waits at a `yield`.

    A `RuntimeError` of a step is thrown into the generator.
    """
    on_cpu = device.type == "cpu"
    use_device = None if on_cpu else device.type
    reasons = {} if on_cpu else {"peak_memory_bytes": "the CUDA allocator tells it"}
    try:
        # `torch.profiler.profile` warns, or makes an object of every event: slower than the steps.
        with profile(use_device=use_device, profile_memory=on_cpu, use_kineto=True) as profiled:
            yield
            level = live_tensor_bytes("cpu") + untracked_bytes()
            if not on_cpu:
                torch.cuda.synchronize(device)
            since = time.time_ns()
            yield
            if not on_cpu:
                torch.cuda.synchronize(device)
    except RuntimeError as error:
        logger.warning("the profiler failed", exc_info=True)
        reason = f"the profiler failed: {error}"
        return None, None, {"peak_memory_bytes": reason, "exposed_communication_seconds": reason}
    peak = level + allocator_rise_bytes(profiled, since_nanoseconds=since) if on_cpu else None
    exposed = exposed_communication_seconds(profiled, since_nanoseconds=since, on_cpu=on_cpu)
    if exposed is None:
        reasons["exposed_communication_seconds"] = NO_KERNELS
    return peak, exposed, reasons


def exposed_communication_seconds(
    profiled: profile, *, since_nanoseconds: int, on_cpu: bool
) -> float | None:
    """Return the seconds since an instant in which communication ran without computation.

    Communication is NCCL's kernels on the GPU and gloo's work on the host.  If no NCCL kernel ran,
    `c10d` calls are gloo's, too.  Computation is all other kernels, or all tensor operators on a
    CPU.  Returns None if the kernels of a GPU were not recorded.
    """
    results = profiled.kineto_results
    assert results is not None, "the profile has not ended"
    kernels: list[tuple[str, Interval]] = []
    calls: list[tuple[str, Interval]] = []
    for event in results.events():
        if event.start_ns() < since_nanoseconds or event.name() == "[memory]":
            continue
        on_device = event.device_type() != DeviceType.CPU
        if on_device and not _is_work(event):
            continue  # an annotation that spans the work of other events
        interval = (event.start_ns(), event.start_ns() + event.duration_ns())
        (kernels if on_device else calls).append((event.name(), interval))
    if not kernels and not on_cpu:
        return None
    of_nccl = [interval for name, interval in kernels if name.startswith("nccl")]
    carriers = ("gloo:",) if of_nccl else ("gloo:", "c10d::")
    on_host = [interval for name, interval in calls if name.startswith(carriers)]
    hidden_by = (
        [interval for name, interval in calls if name.startswith("aten::")]
        if on_cpu
        else [interval for name, interval in kernels if not name.startswith("nccl")]
    )
    busy = covered_nanoseconds(chain(of_nccl, on_host, hidden_by))
    return (busy - covered_nanoseconds(hidden_by)) / 1e9


def _is_work(event: _KinetoEvent) -> bool:
    """Return True for work of the device; PyTorch before 2.12 names no kind of activity."""
    if hasattr(event, "activity_type"):
        return event.activity_type() in DEVICE_WORK
    return not event.is_user_annotation()


def covered_nanoseconds(intervals: Iterable[Interval]) -> int:
    """Return the length of the union of the intervals."""
    covered = last_end = 0
    for start, end in sorted(intervals):
        covered += max(0, end - max(start, last_end))
        last_end = max(last_end, end)
    return covered


def model_counts(
    workload: Workload,
    model: nn.Module,
    recipe: Recipe,
    *,
    tensor_ranks: int = 1,
    sequence_ranks: int = 1,
) -> dict[str, Any]:
    """Return counts of the workload's model that no strategy changes.  Modifies the model."""
    plan: object = workload.tensor_plan(model) if tensor_ranks > 1 else None
    plan = workload.sequence_plan(model) if sequence_ranks > 1 else plan

    def counted() -> tuple[int | None, dict[str, int] | None]:
        if plan is None:
            return workload.sample_input_flops(model), None
        from shardmark.ranks.strategies.layers.activation_traffic import count_sample

        return count_sample(workload, model, plan)

    flops, divided = counted()
    trained = [p for p in model.parameters() if p.requires_grad]
    counts: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained_parameters": sum(p.numel() for p in trained),
        "trained_matrices": matrix_shapes(p.shape for p in trained),
        "frozen_element_bytes": frozen_element_bytes(model.parameters()),
        "batch_norms": sum(
            isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
            for module in (() if recipe.sync_batch_norm else model.modules())
        ),
        "flops_per_sample": flops,
        "divided": divided,
        "divided_again": {},
    }
    if recipe.activation_checkpointing:
        checkpoint_blocks(model, recipe.activation_checkpointing, workload.blocks(model))
        flops, twice = counted()
        if divided is not None and twice is not None:
            counts["divided_again"] = {side: twice[side] - divided[side] for side in divided}
    return counts | {"hardware_flops_per_sample": flops}
