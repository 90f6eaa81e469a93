"""Sequence parallelism: ranks exchange parts of sequences for attention heads around attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from shardmark.ranks.strategies.step import EagerWorker
from shardmark.ranks.workloads.base import Batch, CannotShard, LossSum, SequencePlan

if TYPE_CHECKING:
    from shardmark.ranks.measure.step.recorder import Spans


class _AllToAll(torch.autograd.Function):
    """Shards one axis over the ranks and gathers another one; backward does the reverse."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, divided: int, joined: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.back = (joined, divided, group)
        return _exchange_axes(tensor, divided, joined, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange_axes(gradient, *ctx.back), None, None, None


def _exchange_axes(tensor: Tensor, divided: int, joined: int, group: dist.ProcessGroup) -> Tensor:
    sent = torch.stack(tensor.chunk(group.size(), divided)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), joined)


class SequenceExchange:
    """Exchange among the ranks of a group while `parts` is True; otherwise inputs are unchanged."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.parts = group, False

    def to_heads(self, part: Tensor, *, positions: int, heads: int) -> Tensor:
        return self._exchanged(part, heads, positions)

    def to_positions(self, full: Tensor, *, positions: int, heads: int) -> Tensor:
        return self._exchanged(full, positions, heads)

    def _exchanged(self, tensor: Tensor, divided: int, joined: int) -> Tensor:
        if not self.parts:
            return tensor
        return _AllToAll.apply(tensor, divided, joined, self.group)  # type: ignore[no-any-return]


class _Counting:
    """Counts the elements that ranks would exchange, on full sequences."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        """Positions and elements of a sample for each call."""

    def to_heads(self, part: Tensor, *, positions: int, heads: int) -> Tensor:
        self.calls.append((part.shape[positions], part.numel() // part.shape[0]))
        return part

    to_positions = to_heads


@contextmanager
def counting_exchanged(plan: SequencePlan) -> Iterator[Counter[str]]:
    """Count `exchanged` elements of the longest samples, and `calls` of the exchange."""
    counting, counted = _Counting(), Counter[str]()
    plan.attend(counting)
    yield counted
    longest = max((positions for positions, _ in counting.calls), default=0)
    counted["exchanged"] = sum(count for positions, count in counting.calls if positions == longest)
    counted["calls"] = len(counting.calls)


def problems_with(
    plan: SequencePlan | CannotShard, model: nn.Module, ranks: int
) -> Iterator[CannotShard]:
    """Yield the reasons why this number of ranks cannot divide the sequences."""
    if isinstance(plan, CannotShard):
        yield plan
        return
    for quantity, count in plan.units.items():
        if count % ranks:
            fitting = [str(size) for size in range(2, count + 1) if count % size == 0][:4]
            remedy = f"use {' or '.join(fitting)} ranks of sequence, or fsdp"
            yield CannotShard(f"{count} {quantity} cannot be divided over {ranks} ranks", remedy)
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.p:
            reason = f"{name}, a dropout, would draw other masks for parts of sequences"
            yield CannotShard(reason, "set dropout to 0")
        if isinstance(module, _BatchNorm):
            reason = f"{name}, a batch norm, would take the statistics of a part"
            yield CannotShard(reason, "use another norm, or ddp")


@dataclass(kw_only=True, eq=False)
class SequenceWorker(EagerWorker):
    """Trains on a part of each sequence; other ranks of its group have the other parts.

    Gradients are reduced over all ranks.
    """

    plan_of: Callable[[nn.Module], SequencePlan]
    """Returns the plan that divides the sequences; raises if they cannot be divided."""
    sequence: dist.ProcessGroup
    """Ranks that process the same samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        plan = self.plan_of(self.module)
        self._part = plan.part
        self._exchange = SequenceExchange(self.sequence)
        plan.attend(self._exchange)

    def step(self, batch: Batch, recorder: Spans) -> Tensor:
        """Return the loss of the full sequences, summed over the group."""
        part = self._part(batch, self.sequence.rank(), self.sequence.size())
        self._exchange.parts = True  # evaluation calls the model with whole sequences
        try:
            loss = super().step(part, recorder)
        finally:
            self._exchange.parts = False
        return loss / self.sequence.size()

    def _send_loss(self, loss: Tensor) -> dist.Work | None:
        return dist.all_reduce(loss, group=self.sequence, async_op=True)

    def _over_shares(self, value: Tensor) -> Tensor:
        """Sum over shares and over parts of sequences, each with a part of the weight."""
        dist.all_reduce(value)
        return value

    def share_weight(self, batch: Batch) -> float:
        if self._adds_weights:
            dist.all_reduce(self._share_weight, group=self.sequence)
        return super().share_weight(batch)

    def _check_weight(self, loss: LossSum, batch: Batch) -> None:
        """Check once that the parts together have the weight of their samples."""
        if not self._weight_checked:
            weight = torch.as_tensor(loss.weight, dtype=torch.float32, device=self.device).clone()
            dist.all_reduce(weight, group=self.sequence)
            super()._check_weight(replace(loss, weight=weight), batch)
