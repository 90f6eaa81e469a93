"""Values that ranks exchange outside of their steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch exports it lazily

from shardmark.ranks.strategies.base import PIECE_ELEMENTS, WORD_BYTES, TrainingGroup


def threads_here() -> int:
    return len([*Path("/proc/self/task").iterdir()])


@pytest.fixture
def _alone() -> Iterator[None]:
    """A group of one rank, which computes with two threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_alone")
def test_large_values_are_gathered_without_more_threads() -> None:
    """More OpenMP threads than cores would make every later step of the rank slower."""
    torch.zeros(2**20).add_(1)  # this thread has its team
    threads = threads_here()
    piece_bytes = WORD_BYTES * PIECE_ELEMENTS
    values = [b"x" * size for size in (0, piece_bytes - 40, piece_bytes, 10 * piece_bytes)]
    assert [TrainingGroup().gather(value) for value in values] == [[value] for value in values]
    assert threads_here() == threads
    gathered = [torch.empty(10 * PIECE_ELEMENTS)]
    dist.all_gather(gathered, torch.zeros(10 * PIECE_ELEMENTS))
    assert threads_here() > threads, "what a message in one piece does"
