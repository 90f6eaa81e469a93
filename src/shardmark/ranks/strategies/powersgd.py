"""torch's PowerSGD in DDP, with first factors that do not depend on DDP's buckets."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from shardmark.base.errors import StrategyUnavailable
from shardmark.base.numerics import PowerSGD

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
    from torch.futures import Future
    from torch.nn.parallel import DistributedDataParallel


def first_factor(power_sgd: PowerSGD, name: str, rows: int, columns: int) -> Tensor:
    """Initial right factor of a parameter's gradient, of shape (columns, rank) on the CPU.

    It is drawn by the parameter's name, so it does not depend on `bucket_mb`.
    """
    draws = torch.Generator().manual_seed(zlib.crc32(f"{power_sgd.seed}/{name}".encode()))
    return torch.randn(columns, power_sgd.factor_rank(rows, columns), generator=draws)


class InOrder(dist.ProcessGroup):
    """Process group whose all-reduces are complete when they return.

    torch's hook starts the next of a bucket's three all-reduces when the previous one is complete,
    which gloo reports on its own threads.  All-reduces of several buckets would start in a
    different order on each rank, and the threads could wait for each other.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group

    def allreduce(self, *arguments: Any) -> dist.Work:
        work = self._group.allreduce(*arguments)
        work.wait()
        return work


class PowerSGDReduction:
    """Registers torch's hook, and sets the first factors in the hook's state.

    The state is indexed by bucket.  DDP rebuilds its buckets after the first step, which is never
    compressed.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        power_sgd: PowerSGD,
        options: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        """Raises `StrategyUnavailable` on a CPU beside visible GPUs."""
        if device.type == "cpu" and torch.cuda.is_available():
            raise StrategyUnavailable(
                "ddp",
                "torch's PowerSGD makes a visible GPU wait for the CPU",
                "hide the GPUs: CUDA_VISIBLE_DEVICES=''",
            )
        group = ddp.process_group
        if dist.get_backend(group) == "gloo":
            group = InOrder(group)
        self._power_sgd = power_sgd
        self._names: dict[Tensor, str] = {p: name for name, p in ddp.module.named_parameters()}
        self.state = PowerSGDState(group, **options)
        ddp.register_comm_hook(self.state, lambda _, bucket: self._reduce(bucket))

    def _reduce(self, bucket: GradBucket) -> Future[Tensor]:
        state = self.state
        compresses = state.iter >= state.start_powerSGD_iter
        if compresses and bucket.index() not in state.q_memory_dict:
            self._begin(bucket.index(), bucket.parameters())
        return powerSGD_hook(state, bucket)

    def _begin(self, index: int, parameters: Sequence[Tensor]) -> None:
        """Set the first factors of a bucket's parameters in the hook's state."""
        device = parameters[0].device
        lefts, rights = [torch.empty(0, device=device)], [torch.empty(0, device=device)]
        for parameter, rows, columns in self._compressed(parameters):
            right = first_factor(self._power_sgd, self._names[parameter], rows, columns)
            lefts.append(torch.empty(rows * right.shape[1], device=device))
            rights.append(right.flatten().to(device))
        self.state.p_memory_dict[index] = torch.cat(lefts)
        self.state.q_memory_dict[index] = torch.cat(rights)

    def _compressed(self, parameters: Sequence[Tensor]) -> list[tuple[Tensor, int, int]]:
        """Compressed parameters of a bucket with rows and columns, in the hook's order."""
        by_shape: dict[tuple[int, int], list[tuple[Tensor, int, int]]] = {}
        for parameter in parameters:
            rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
            if self._power_sgd.factor_rank(rows, columns):
                by_shape.setdefault((rows, columns), []).append((parameter, rows, columns))
        return [entry for same_shape in by_shape.values() for entry in same_shape]

    def tensors(self) -> list[Tensor]:
        """Compression errors and right factors of all buckets."""
        return [*self.state.error_dict.values(), *self.state.q_memory_dict.values()]
