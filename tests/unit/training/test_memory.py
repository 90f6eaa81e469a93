"""Bytes of tensors, counted on tensors of known size."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from shardmark.measure.memory.tensors import (
    allocator_rise_bytes,
    live_tensor_bytes,
    storage_bytes,
)

MiB = 2**20


def test_each_storage_counts_once_and_whole() -> None:
    whole = torch.zeros(10, 4)
    views = [whole, whole[2:3], whole.t(), whole.detach(), nn.Parameter(whole)]
    assert storage_bytes(views) == 160
    assert storage_bytes([whole[2:3]]) == 160, "a view keeps its whole storage"
    assert storage_bytes([whole, whole.clone()]) == 320
    assert storage_bytes([torch.zeros(3, dtype=torch.bfloat16), torch.empty(0)]) == 6
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
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
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
