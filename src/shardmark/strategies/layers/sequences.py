"""Ranks with parts of the same sequences, which they exchange for heads around attention."""

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

from shardmark.strategies.step import EagerWorker
from shardmark.workloads.base import Batch, CannotShard, LossSum, SequencePlan

if TYPE_CHECKING:
    from shardmark.measure.step.recorder import Spans


class _AllToAll(torch.autograd.Function):
    """Divides one axis over the ranks, and puts another one together; the gradient goes back."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, divided: int, joined: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.back = (joined, divided, group)
        return _passed(tensor, divided, joined, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _passed(gradient, *ctx.back), None, None, None


def _passed(tensor: Tensor, divided: int, joined: int, group: dist.ProcessGroup) -> Tensor:
    sent = torch.stack(tensor.chunk(group.size(), divided)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), joined)


class SequenceExchange:
    """Among the ranks of a group while `parts` are computed; whole sequences pass as they are."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.parts = group, False

    def to_heads(self, part: Tensor, *, positions: int, heads: int) -> Tensor:
        return self._exchanged(part, heads, positions)

    def to_positions(self, whole: Tensor, *, positions: int, heads: int) -> Tensor:
        return self._exchanged(whole, positions, heads)

    def _exchanged(self, tensor: Tensor, divided: int, joined: int) -> Tensor:
        if not self.parts:
            return tensor
        return _AllToAll.apply(tensor, divided, joined, self.group)  # type: ignore[no-any-return]


class _Counting:
    """Counts what would be exchanged of whole sequences."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        """Positions, and elements of a sample."""

    def to_heads(self, part: Tensor, *, positions: int, heads: int) -> Tensor:
        self.calls.append((part.shape[positions], part.numel() // part.shape[0]))
        return part

    to_positions = to_heads


@contextmanager
def counting_exchanged(plan: SequencePlan) -> Iterator[Counter[str]]:
    """`exchanged`: elements of a sample that attention takes and gives; of the longest samples."""
    counting, counted = _Counting(), Counter[str]()
    plan.attend(counting)
    yield counted
    longest = max((positions for positions, _ in counting.calls), default=0)
    counted["exchanged"] = sum(count for positions, count in counting.calls if positions == longest)
    counted["calls"] = len(counting.calls)


def problems_with(
    plan: SequencePlan | CannotShard, model: nn.Module, ranks: int
) -> Iterator[CannotShard]:
    """Why so many ranks cannot share its sequences and train the same; nothing where they can."""
    if isinstance(plan, CannotShard):
        yield plan
        return
    for what, count in plan.units.items():
        if count % ranks:
            fitting = [str(size) for size in range(2, count + 1) if count % size == 0][:4]
            remedy = f"use {' or '.join(fitting)} ranks of sequence, or fsdp"
            yield CannotShard(f"{count} {what} cannot be divided over {ranks} ranks", remedy)
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.p:
            found = f"{name}, a dropout, would draw other masks for parts of sequences"
            yield CannotShard(found, "set dropout to 0")
        if isinstance(module, _BatchNorm):
            found = f"{name}, a batch norm, would take the statistics of a part"
            yield CannotShard(found, "use another norm, or ddp")


@dataclass(kw_only=True, eq=False)
class SequenceWorker(EagerWorker):
    """Trains on one part of each sequence; the other ranks of its group have the others.

    Gradients reduce over all ranks, whatever they have parts of.
    """

    plan_of: Callable[[nn.Module], SequencePlan]
    """How ranks share the sequences of the model; raises where they cannot."""
    sequence: dist.ProcessGroup
    """Ranks with the same samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        plan = self.plan_of(self.module)
        self._part = plan.part
        self._exchange = SequenceExchange(self.sequence)
        plan.attend(self._exchange)

    def step(self, batch: Batch, recorder: Spans) -> Tensor:
        """The loss of the whole sequences, which all ranks of the group tell."""
        part = self._part(batch, self.sequence.rank(), self.sequence.size())
        self._exchange.parts = True  # evaluation calls the model with whole sequences
        try:
            loss = super().step(part, recorder)
        finally:
            self._exchange.parts = False
        return loss / self.sequence.size()

    def _tell(self, loss: Tensor) -> dist.Work | None:
        return dist.all_reduce(loss, group=self.sequence, async_op=True)

    def _over_shares(self, value: Tensor) -> Tensor:
        """The sum over parts of sequences, too, which each have a part of the weight."""
        dist.all_reduce(value)
        return value

    def share_weight(self, batch: Batch) -> float:
        if self._adds_weights:
            dist.all_reduce(self._share_weight, group=self.sequence)
        return super().share_weight(batch)

    def _check_weight(self, loss: LossSum, batch: Batch) -> None:
        """Once: parts together must weigh what their samples do."""
        if not self._weight_checked:
            weight = torch.as_tensor(loss.weight, dtype=torch.float32, device=self.device).clone()
            dist.all_reduce(weight, group=self.sequence)
            super()._check_weight(replace(loss, weight=weight), batch)
