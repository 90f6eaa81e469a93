"""torch's PowerSGD in DDP, with a memory that goes by parameters and not by DDP's buckets."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)

from shardmark.core.numerics import PowerSGD

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
    from torch.futures import Future
    from torch.nn.parallel import DistributedDataParallel


def first_factor(power_sgd: PowerSGD, name: str, rows: int, columns: int) -> Tensor:
    """What the right factor of a parameter's gradient begins with, (columns, thin) on the CPU.

    By its name, and not by its place in a bucket: the same whatever `bucket_mb` is.
    """
    draws = torch.Generator().manual_seed(zlib.crc32(f"{power_sgd.seed}/{name}".encode()))
    return torch.randn(columns, power_sgd.factor_rank(rows, columns), generator=draws)


class InOrder(dist.ProcessGroup):
    """The group, whose reductions have ended when they return.

    torch's hook begins the next of a bucket's three reductions when the one before has ended, which
    gloo tells on threads of its own.  Those of several buckets would begin in another order on each
    rank, and the two threads could wait for each other's.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group

    def allreduce(self, *arguments: Any) -> dist.Work:
        work = self._group.allreduce(*arguments)
        work.wait()
        return work


class PowerSGDReduction:
    """Registers torch's hook, and holds what it keeps from step to step.

    The hook keeps that by the number of a bucket.  DDP fills its buckets anew after the first step
    of a process, which after a restart is one that compresses.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        named: Mapping[str, nn.Parameter],
        power_sgd: PowerSGD,
        options: Mapping[str, Any],
    ) -> None:
        group = ddp.process_group
        if dist.get_backend(group) == "gloo":
            group = InOrder(group)
        self._power_sgd = power_sgd
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in named.items()}
        self._state = PowerSGDState(group, **options)
        self._buckets: dict[int, Sequence[Tensor]] = {}
        """The parameters that the hook's memory of a bucket is of."""
        self._apart: dict[str, Tensor] = {}
        """What is in no bucket yet, as `tensors` has it."""
        ddp.register_comm_hook(self._state, lambda _, bucket: self._reduce(bucket))

    def _reduce(self, bucket: GradBucket) -> Future[Tensor]:
        if self._state.iter >= self._state.start_powerSGD_iter:
            self._place(bucket.index(), bucket.parameters())
        return powerSGD_hook(self._state, bucket)

    def _place(self, index: int, parameters: Sequence[Tensor]) -> None:
        """Have the hook's memory of a bucket be of these parameters."""
        if [*map(id, self._buckets.get(index, ()))] == [*map(id, parameters)]:
            return
        state = self._state
        for moved in [each for each in self._buckets if each >= index]:
            self._apart |= self._taken_apart(moved)
            for memory in (
                self._buckets,
                state.error_dict,
                state.p_memory_dict,
                state.q_memory_dict,
            ):
                del memory[moved]
        device = parameters[0].device
        errors = [
            self._apart.pop(f"error/{self._names[p]}", torch.zeros(p.numel(), device=device))
            for p in parameters
        ]
        lefts, rights = [torch.empty(0, device=device)], [torch.empty(0, device=device)]
        for parameter, rows, columns in self._compressed(parameters):
            name = self._names[parameter]
            right = self._apart.pop(f"factor/{name}", None)
            if right is None:
                right = first_factor(self._power_sgd, name, rows, columns).to(device)
            lefts.append(torch.empty(rows * right.shape[1], device=device))
            rights.append(right.flatten())
        state.error_dict[index] = torch.cat(errors)
        state.p_memory_dict[index] = torch.cat(lefts)
        state.q_memory_dict[index] = torch.cat(rights)
        self._buckets[index] = parameters

    def _compressed(self, parameters: Sequence[Tensor]) -> list[tuple[Tensor, int, int]]:
        """Those of a bucket, with rows and columns, in the order of the hook: by shape."""
        by_shape: dict[tuple[int, int], list[tuple[Tensor, int, int]]] = {}
        for parameter in parameters:
            rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
            if self._power_sgd.factor_rank(rows, columns):
                by_shape.setdefault((rows, columns), []).append((parameter, rows, columns))
        return [each for alike in by_shape.values() for each in alike]

    def _taken_apart(self, index: int) -> dict[str, Tensor]:
        """The hook's memory of a bucket by parameter, as views."""
        parameters, state = self._buckets[index], self._state
        errors = state.error_dict[index].split_with_sizes([p.numel() for p in parameters])
        apart = {f"error/{self._names[p]}": e for p, e in zip(parameters, errors, strict=True)}
        compressed = self._compressed(parameters)
        shapes = [
            (columns, self._power_sgd.factor_rank(rows, columns)) for _, rows, columns in compressed
        ]
        rights = state.q_memory_dict[index].split_with_sizes([c * thin for c, thin in shapes])
        for (parameter, *_), right, shape in zip(compressed, rights, shapes, strict=True):
            apart[f"factor/{self._names[parameter]}"] = right.view(shape)
        return apart

    def tensors(self) -> dict[str, Tensor]:
        """What it keeps, by name: each parameter's error, flat, and its right factor."""
        kept = dict(self._apart)
        for index in self._buckets:
            kept |= self._taken_apart(index)
        return kept

    def load(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Go on with what `tensors` gave, after so many steps of all; before the first one here."""
        device = next(iter(self._names)).device
        self._apart = {name: tensor.to(device) for name, tensor in tensors.items()}
        self._state.iter = steps
