"""A process group of this process alone, for code that must not wait for other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


@contextmanager
def one_rank() -> Iterator[None]:
    """Make this process its own default group: no collective inside waits for other ranks."""
    world = dist.group.WORLD
    if world is None:
        from shardmark.ranks.train.exchanged_group import ALONE, world_of

        with world_of(ALONE):
            yield
        return
    if world.size() == 1:
        yield
        return
    if not (_single_rank_group and _single_rank_group[0] is world):
        _single_rank_group[:] = [world, _group_of_this_process()]
    dist.group.WORLD = _single_rank_group[1]
    try:
        yield
    finally:
        dist.group.WORLD = world


def _group_of_this_process() -> Any:
    """Make a group of this process without the other processes.

    torch names later groups by the number of earlier ones, which must stay equal on all ranks.
    Some ranks, such as parameter servers, never make a group like this one.
    """
    torch_world: Any = distributed_c10d._world
    count = torch_world.group_count
    torch_world.group_count = -1  # the count is a part of this group's own name
    try:
        return dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    finally:
        torch_world.group_count = count


_single_rank_group: list[Any] = []
"""A default group, and the group of this process that was made inside it."""
