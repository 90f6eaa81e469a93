"""Makes batches in the step that asks for them, or ahead of it in other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from shardmark.core.errors import ShardmarkError
from shardmark.workloads.pictures import gpu_in_use

Item = TypeVar("Item")
Made = TypeVar("Made")


class _Steps(Dataset[Made | ShardmarkError], Generic[Item, Made]):
    """Item `step` is that step's whole batch, or the error it met: a loader loses its type."""

    def __init__(self, make: Callable[[Item], Made]) -> None:
        self._make = make

    def __getitem__(self, item: Item) -> Made | ShardmarkError:
        try:
            return self._make(item)
        except ShardmarkError as error:
            return error


def batches_in_order(
    make: Callable[[Item], Made], items: Iterable[Item], *, workers: int
) -> Iterator[Made]:
    """`make(step)` for each of the steps, two batches ahead in each of `workers` processes."""
    if workers == 0:
        yield from map(make, items)
        return
    loader = DataLoader(
        _Steps(make),
        batch_size=None,  # an item is a batch already
        sampler=cast("Sampler[int]", items),
        num_workers=workers,
        prefetch_factor=2,
        persistent_workers=True,
        pin_memory=gpu_in_use(),
        multiprocessing_context="fork",
        generator=torch.Generator(),  # else it draws from the generator that dropout uses
    )
    for made in loader:
        if isinstance(made, ShardmarkError):
            break
        yield made
    else:
        return
    # Ends its processes.  An error's traceback would keep them until garbage is collected, when
    # they no longer hear that they are to end, and are waited for in vain for 5 seconds each.
    del loader
    raise made
