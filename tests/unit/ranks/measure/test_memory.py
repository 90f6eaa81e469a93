"""Bytes of tensors, counted on tensors of known size."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread

import pytest
import torch
from torch import nn
from torch.autograd.profiler import profile

from shardmark.ranks.measure.memory.tensors import (
    CudaPeak,
    allocator_rise_bytes,
    live_tensor_bytes,
    storage_bytes,
    temporary_memory,
)
from shardmark.ranks.measure.step.recorder import clock_for
from tests.unit.ranks.train.toy import CPU

MiB = 2**20


def test_each_storage_counts_once_and_whole() -> None:
    whole = torch.zeros(10, 4)
    views = [whole, whole[2:3], whole.t(), whole.detach(), nn.Parameter(whole)]
    assert storage_bytes(views) == 160
    assert storage_bytes([whole[2:3]]) == 160, "a view keeps its whole storage"
    assert storage_bytes([torch.zeros(3, dtype=torch.bfloat16), torch.empty(0)]) == 6
    rows = torch.zeros(9, 3)
    rows[[1, 4]] = 1.0
    rows = rows.to_sparse(1)
    assert storage_bytes([rows]) == 2 * 8 + 6 * 4, "indices and values"
    assert storage_bytes([torch.zeros(1).expand(1000)]) == 4
    seen: set[int] = set()
    assert storage_bytes([whole], seen=seen) == 160
    assert storage_bytes([whole, torch.zeros(3)], seen=seen) == 12


def test_live_tensors_are_found_and_counted_once() -> None:
    gc.collect()  # what other tests left in cycles
    before = live_tensor_bytes("cpu")
    kept = {"deep": [torch.zeros(MiB), nn.Linear(512, 512, bias=False)]}
    view = kept["deep"][0][5:]  # type: ignore[index]
    assert live_tensor_bytes("cpu") - before == 4 * MiB + 4 * 512 * 512
    assert view.numel() == MiB - 5
    del kept, view
    assert live_tensor_bytes("cpu") == before
    assert live_tensor_bytes("cuda") == 0


def test_allocator_s_rise_is_the_highest_level_after_the_instant() -> None:
    """Known allocations: 8 MiB before the instant; then 4 MiB, and at most 4 + 2 MiB at once."""
    with profile(profile_memory=True, use_kineto=True) as profiled:
        early = torch.empty(2 * MiB)
        since = time.time_ns()
        first = torch.empty(MiB)
        second = torch.empty(MiB // 2)
        del second
        third = torch.empty(MiB // 4)
        del early, first, third
    rise = allocator_rise_bytes(profiled, since_nanoseconds=since)
    assert rise == pytest.approx(6 * MiB, abs=64)
    assert allocator_rise_bytes(profiled, since_nanoseconds=time.time_ns()) == 0


def test_memory_freed_by_other_threads_is_not_counted() -> None:
    """Torch's profiler does not see it: 4 MiB that a thread frees, then 2 MiB."""
    with profile(profile_memory=True, use_kineto=True) as profiled:
        since = time.time_ns()
        handed_over = [torch.empty(MiB)]
        thread = Thread(target=handed_over.clear)
        thread.start()
        thread.join()
        second = torch.empty(MiB // 2)
        del second
    rise = allocator_rise_bytes(profiled, since_nanoseconds=since)
    assert rise == pytest.approx(4 * MiB, abs=64)


class FakeCuda:
    """An allocator of two devices, of which the second is the fuller one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 10 + device.index)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 20 + device.index)
        for name in ("reset_peak_memory_stats", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, self._noting(name))
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
        monkeypatch.setattr(torch.cuda, "MemPool", self._pool)
        monkeypatch.setattr(torch.cuda, "use_mem_pool", self._use)

    def _noting(self, name: str) -> Callable[[torch.device], None]:
        return lambda device: self.calls.append(f"{name} {device.index}")

    def _pool(self) -> object:
        pool = Pool()
        weakref.finalize(pool, self.calls.append, "released")
        return pool

    @contextmanager
    def _use(self, pool: object, device: torch.device) -> Iterator[None]:
        assert isinstance(pool, Pool)
        self.calls.append(f"begin {device.index}")
        yield
        self.calls.append("end")


class Pool:
    """Memory that the allocator holds apart from all else."""


GPUS = [torch.device("cuda", index) for index in range(2)]


def test_the_fullest_device_of_a_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch)
    peak = CudaPeak(GPUS)
    peak.window_started()
    peak.window_stopped()
    assert (peak.allocated_bytes, peak.reserved_bytes) == (11, 21)
    clock_for(GPUS).synchronize()
    each = [f"{name} {i}" for name in ("reset_peak_memory_stats", "synchronize") for i in range(2)]
    assert fake.calls == each


def test_an_evaluation_s_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the windows of all later epochs would seem to have reserved it."""
    fake = FakeCuda(monkeypatch)
    with temporary_memory(CPU):
        pass
    assert fake.calls == []
    with temporary_memory(GPUS[1]):
        fake.calls.append("evaluation")
    assert fake.calls == ["begin 1", "evaluation", "end", "synchronize 1", "released"]
    with pytest.raises(RuntimeError, match="out of memory"), temporary_memory(GPUS[0]):
        raise RuntimeError("out of memory")
