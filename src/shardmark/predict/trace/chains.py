"""Counts the bytes that traced operations move, where a compiler fuses chains of them into one."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from shardmark.predict.profile import Kind
from shardmark.predict.trace.tensor_sharding import storage_key

if TYPE_CHECKING:
    from torch import Tensor


class Total(NamedTuple):
    """A count, and the part of it that every tensor-parallel rank has in full."""

    total: float = 0.0
    replicated: float = 0.0

    def plus(self, total: float, replicated: float) -> Total:
        return Total(self.total + total, self.replicated + replicated)

    def minus(self, other: Total) -> Total:
        return Total(self.total - other.total, self.replicated - other.replicated)

    def times(self, count: int) -> Total:
        return Total(count * self.total, count * self.replicated)


ZERO = Total()


@dataclass(slots=True)
class Work:
    """An operation, or a chain of operations that a compiler fuses into one."""

    kind: Kind
    flops: Total = ZERO
    bytes: Total = ZERO
    calls: int = 1
    chained: set[int] = field(default_factory=set)
    """Storages that a chain has read or computed."""
    inputs: dict[int, int] = field(default_factory=dict)
    """Bytes, by storage, that a chain has read."""
    written: set[int] = field(default_factory=set)
    """Storages of a chain's results that are in memory, since another operation has read them."""


class Chains:
    """Follows storages through chains of fused operations.

    A chain reads each of its inputs once.  It writes a result only if another operation reads it.
    In the backward pass a chain computes results of the forward pass again, from their inputs.
    """

    def __init__(self) -> None:
        self._last: tuple[list[Work], Work] | None = None
        """The chain that has not ended, and the operations that it belongs to."""
        self._sources: dict[int, Work] = {}
        """The chain that computes each storage."""

    def forget(self, storage: int) -> None:
        """Remove a freed storage: another may get its number."""
        self._sources.pop(storage, None)
        if self._last is not None:
            self._last[1].chained.discard(storage)

    def work(self, operations: list[Work], kind: Kind, *, fused: bool) -> Work:
        """Return the record of an operation among those of its unit and pass.

        A fused operation continues the chain before it.
        """
        if fused and self._last is not None and self._last[0] is operations:
            return self._last[1]
        operations.append(Work(kind))
        self._last = (operations, operations[-1]) if fused else None
        return operations[-1]

    def moved(
        self,
        work: Work,
        read: Sequence[Tensor],
        written: Sequence[Tensor],
        *,
        fused: bool,
        again: Container[int],
    ) -> Iterator[tuple[Tensor, int]]:
        """Yield the tensors of an operation with the bytes that it moves for each.

        `again` are storages that a fused operation does not read, but computes again.
        """
        for tensor in read:
            key, count = storage_key(tensor), tensor.nbytes
            if fused and key in work.chained:
                continue
            source = self._sources.get(key)
            if source is not None and fused and key in again:
                inputs = {k: n for k, n in source.inputs.items() if k not in work.chained}
                work.chained |= inputs.keys()
                count = sum(inputs.values())
            elif source is not None and key not in source.written:
                source.written.add(key)
                count *= 2
            if fused:
                work.chained.add(key)
                work.inputs[key] = count
            yield tensor, count
        for tensor in written:
            key = storage_key(tensor)
            if not fused:
                yield tensor, tensor.nbytes
            elif key not in work.chained:
                work.chained.add(key)
                self._sources[key] = work
