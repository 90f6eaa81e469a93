"""A process group in Python, for task code that communicates by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch exports it lazily

BACKEND = "exchanged"
DEFAULT_NAME = "0"
"""Name that torch gives to the first group of a process."""

Exchange = Callable[[str, Any], Sequence[Any]]
"""Takes the name of a collective and this rank's value; returns the values of all ranks in order.
Raises if a rank cannot wait for the other ranks."""


class CannotPlayError(Exception):
    """A collective that one process cannot perform for several ranks."""


@dataclass(frozen=True, slots=True)
class Players:
    """The ranks that one process plays, and the function by which they exchange values."""

    ranks: int
    exchange: Exchange
    current_rank: Callable[[], int]


ALONE = Players(1, lambda _, value: [value], lambda: 0)
"""A single rank, which gathers its own value."""


class Done(dist.Work):
    """The handle of a collective that has finished."""

    def __init__(self, result: object) -> None:
        super().__init__()
        self._future: torch.futures.Future[object] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


_ProcessGroup: Any = dist.ProcessGroup
"""Untyped, because torch declares many methods in a form that it does not call in Python."""


class ExchangedGroup(_ProcessGroup):  # type: ignore[misc]
    """Performs collectives on the values that `exchange` returns.

    The method names are those that torch's collectives call; some differ between versions.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__(0, ranks)
        self._ranks = ranks
        self.players = ALONE

    def rank(self) -> int:
        return self.players.current_rank()

    def size(self) -> int:
        return self._ranks

    @property
    def group_name(self) -> str:
        """Name by which torch's functional collectives find the default group."""
        return DEFAULT_NAME if self in _active_groups else BACKEND

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return BACKEND

    def _values(self, name: str, value: Any) -> Sequence[Any]:
        copied = [t.detach().clone() for t in value] if isinstance(value, list) else value
        return self.players.exchange(name, copied)

    def _reduced(self, name: str, tensor: Tensor, opts: Any) -> Tensor:
        values = torch.stack([value for (value,) in self._values(name, [tensor])])
        kinds: dict[Any, Callable[[], Tensor]] = {
            dist.ReduceOp.SUM: lambda: values.sum(0),
            dist.ReduceOp.AVG: lambda: values.sum(0) / len(values),
            dist.ReduceOp.PRODUCT: lambda: values.prod(0),
            dist.ReduceOp.MIN: lambda: values.amin(0),
            dist.ReduceOp.MAX: lambda: values.amax(0),
        }
        for kind, compute in kinds.items():
            if opts.reduceOp == kind:
                return compute().to(tensor.dtype)
        raise CannotPlayError(f"{name} with {opts.reduceOp}")

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Done:
        for tensor in tensors:
            tensor.copy_(self._reduced("all_reduce", tensor, opts))
        return Done(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> Done:
        total = self._reduced("reduce", tensors[0], opts)
        if self.rank() == opts.rootRank:
            tensors[0].copy_(total)
        return Done(tensors)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], *_: Any, **__: Any
    ) -> Done:
        values = self._values("all_gather", inputs)
        for output, (value,) in zip(outputs[0], values, strict=True):
            output.copy_(value)
        return Done(outputs)

    def all_gather_single(self, output: Tensor, value: Tensor, *_: Any, **__: Any) -> Done:
        values = self._values("all_gather_into_tensor", [value])
        output.copy_(torch.cat([value for (value,) in values]).view_as(output))
        return Done(output)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], values: list[Tensor], *_: Any, **__: Any
    ) -> Done:
        for output, value in zip(outputs, values, strict=True):
            self.all_gather_single(output, value)
        return Done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Done:
        tensors[0].copy_(self._values("broadcast", tensors)[opts.rootRank][0])
        return Done(tensors)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *_: Any, **__: Any) -> Done:
        values = self._values("gather", inputs)
        for output, (value,) in zip(outputs[0] if outputs else (), values, strict=False):
            output.copy_(value)
        return Done(outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Done:
        values = self._values("scatter", inputs[0] if inputs else [])
        outputs[0].copy_(values[opts.rootRank][self.rank()])
        return Done(outputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Done:
        total = self._reduced("reduce_scatter", torch.stack(inputs[0]), opts)
        outputs[0].copy_(total[self.rank()])
        return Done(outputs)

    def reduce_scatter_single(self, output: Tensor, value: Tensor, opts: Any) -> Done:
        total = self._reduced("reduce_scatter_tensor", value, opts)
        output.copy_(total.chunk(self._ranks)[self.rank()].view_as(output))
        return Done(output)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], values: list[Tensor], opts: Any
    ) -> Done:
        for output, value in zip(outputs, values, strict=True):
            self.reduce_scatter_single(output, value, opts)
        return Done(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], *_: Any, **__: Any) -> Done:
        for output, value in zip(outputs, self._values("all_to_all", inputs), strict=True):
            output.copy_(value[self.rank()])
        return Done(outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        value: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        *_: Any,
        **__: Any,
    ) -> Done:
        if output_sizes or input_sizes:
            raise CannotPlayError("all_to_all_single with uneven parts")
        received = self._values("all_to_all_single", [value])
        chunks = [value.chunk(self._ranks)[self.rank()] for (value,) in received]
        output.copy_(torch.cat(chunks).view_as(output))
        return Done(output)

    alltoall_base = all_to_all_single

    def barrier(self, *_: Any, **__: Any) -> Done:
        self._values("barrier", [])
        return Done([])

    def send(self, *_: object) -> Done:
        raise CannotPlayError("a message to one rank")

    recv = recv_anysource = send


@contextmanager
def world_of(players: Players) -> Iterator[None]:
    """Make the players the default process group inside the context.

    The same number of players always gets the same group, because a task may keep it between steps.
    """
    if players.ranks not in _groups:
        _groups[players.ranks] = ExchangedGroup(players.ranks)
    group = _groups[players.ranks]
    world = dist.group.WORLD
    if world is not None:
        dist.group.WORLD, group.players = group, players
        try:
            yield
        finally:
            dist.group.WORLD = world
        return

    _active_groups.append(group)
    dist.init_process_group(BACKEND, rank=0, world_size=group.size(), store=HashStore())
    group.players = players  # not earlier: torch asks for the rank, and only code inside may ask
    try:
        yield
    finally:
        group.players = ALONE
        dist.destroy_process_group()
        _active_groups.pop()


_groups: dict[int, ExchangedGroup] = {}
"""Groups by the number of players."""
_active_groups: list[ExchangedGroup] = []
"""Groups of active `world_of` contexts, the innermost last."""


def _group_of(_: object, __: int, ranks: int, ___: timedelta) -> dist.ProcessGroup:
    if ranks != _active_groups[-1].size():
        raise CannotPlayError("a group of some of the ranks")
    return _active_groups[-1]


dist.Backend.register_backend(BACKEND, _group_of, devices=["cpu", "cuda"])
