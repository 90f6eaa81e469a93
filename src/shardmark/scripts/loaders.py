"""Facts of a script's data loaders, and the indices that their samplers give."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, pairwise
from typing import Any

import torch
from torch.utils.data import Subset

from shardmark.scripts.batches import leaves, row_checksums
from shardmark.scripts.record import Loader

MOST_INDICES = 10**6
"""Size of the largest data set whose indices are recorded."""
SETTINGS = ("seed", "epoch", "num_replicas", "rank")
OF_SHUFFLING = ("seed", "epoch", "generator")
"""Attributes of samplers that shuffle, where they have no attribute `shuffle` that tells it."""


class Order:
    """Indices that a sampler gives in one iteration over a loader."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.batches: list[Any] = []
        self.rest: Iterator[Any] = iter(())
        """The sampler's iterator, which gives the batches that follow."""

    def read(self) -> None:
        """Record all of the epoch.  The sampler may draw numbers for its rest: no step follows."""
        loader, order = self._loader, list[Any]()
        with suppress(Exception):  # classes of the script may raise anything
            for batch in chain(self.batches, self.rest):
                indices = batch if isinstance(batch, list) else [batch]
                order += indices
                loader.largest_batch = max(loader.largest_batch, len(indices))
                if len(order) > len(loader.available):
                    break  # it draws with replacement, or has no end
            loader.indices = [loader.available[int(index)] for index in order]
            descents = sum(bool(a > b) for a, b in pairwise(order))
            loader.shuffles &= 8 * descents > len(order)  # a share that is filled up has one or two


def described(loader: Any) -> Loader:
    """Facts of a loader: only its batch size if its data set has no length."""
    with suppress(TypeError, AttributeError, NotImplementedError):
        dataset, sampler = loader.dataset, _innermost(loader)
        # A sampler with weights may give any indices.
        readable = len(dataset) <= MOST_INDICES and not hasattr(sampler, "weights")
        available: Sequence[int] = range(len(dataset) if readable else 0)
        while isinstance(dataset, Subset):
            available = [int(dataset.indices[index]) for index in available]
            dataset = dataset.dataset
        values = {name: getattr(sampler, name, None) for name in SETTINGS}
        by_options = any(hasattr(sampler, name) for name in OF_SHUFFLING)
        return Loader(
            batch_size=loader.batch_size, length=len(loader), samples=len(dataset),
            available=available, sampler=type(sampler).__name__,
            shuffles=bool(getattr(sampler, "shuffle", by_options)),
            sampler_settings={n: value for n, value in values.items() if isinstance(value, int)},
            first_sample=_first_sample(loader, sampler),
        )  # fmt: skip
    return Loader(batch_size=getattr(loader, "batch_size", None))


def _innermost(sampler: Any) -> Any:
    """The sampler inside of a loader, of batch samplers, and of what libraries put around them."""
    for name in ("batch_sampler", "sampler"):
        if (inner := getattr(sampler, name, None)) is not None:
            return _innermost(inner)
    return sampler


def _first_sample(loader: Any, sampler: Any) -> float | None:
    """Checksum of sample 0, which is read without a change of the random numbers that follow.

    All ranks use one seed, as data may be augmented.  Not read for a loader with workers: its data
    set may open files that workers cannot share.
    """
    if getattr(sampler, "num_replicas", 1) == 1 or loader.num_workers:
        return None
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy and numpy.random.get_state()
    sums: list[list[float]] = []
    with torch.random.fork_rng(devices=[]), suppress(Exception):
        for _ in range(4):  # equal by chance only if it draws from a generator of its own
            torch.default_generator.manual_seed(0)
            random.seed(0)
            if numpy is not None:
                numpy.random.seed(0)
            sums.append([float(row_checksums(leaf).sum()) for leaf in leaves(loader.dataset[0])])
    random.setstate(states[0])
    if numpy is not None:
        numpy.random.set_state(states[1])
    return sum(sums[0]) if sums and sums[0] and all(other == sums[0] for other in sums) else None
