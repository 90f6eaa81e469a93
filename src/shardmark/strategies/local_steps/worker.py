"""A worker that trains alone and meets the others at the end of a round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmark.core.numerics import LocalSteps
from shardmark.strategies.base import HeldState
from shardmark.strategies.casting import lossless_copy
from shardmark.strategies.step import EagerWorker, state_tensors


@dataclass(kw_only=True, eq=False)
class LocalWorker(EagerWorker):
    """Its parameters and its optimizer are its own; the outer ones are every rank's alike."""

    local_steps: LocalSteps

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {name: parameter.numel() for name, parameter in self._trained.items()}
        self._fragments = self.local_steps.assign_fragments(sizes)
        self._fragment_of = {n: i for i, names in enumerate(self._fragments) for n in names}
        self._every_step = False
        self._outer: dict[str, nn.Parameter] = {}
        self._outer_optimizer: torch.optim.SGD | None = None
        if (outer := self.local_steps.outer) is not None:
            self._outer = {n: nn.Parameter(p.detach().clone()) for n, p in self._trained.items()}
            self._outer_optimizer = torch.optim.SGD(
                self._outer.values(),
                lr=outer.learning_rate,
                momentum=outer.momentum,
                dampening=0.0,
                weight_decay=0.0,
                nesterov=outer.nesterov,
            )

    def _update(self) -> None:
        super()._update()
        for number, names in enumerate(self._fragments):
            if names and (self._every_step or self.local_steps.is_due(number, self._steps_called)):
                self._synchronise(names)

    @torch.no_grad()
    def _synchronise(self, names: Sequence[str]) -> None:
        """Have the ranks go on from the mean, or from what the outer optimizer makes of it."""
        own = [self._trained[name] for name in names]
        met: Sequence[Tensor] = means_over_ranks(own)
        if self._outer_optimizer is not None:
            outer = [self._outer[name] for name in names]
            for parameter, mean in zip(outer, met, strict=True):
                parameter.grad = parameter - mean
            self._outer_optimizer.step()  # passes over the other fragments, without a gradient
            self._outer_optimizer.zero_grad(set_to_none=True)
            met = outer
        for parameter, value in zip(own, met, strict=True):
            parameter.copy_(value)

    def round_steps(self) -> int:
        return self.local_steps.period_steps

    def end_rounds(self) -> None:
        self._every_step = True

    def each_parameter(self) -> Iterator[tuple[str, Tensor]]:
        """Of the outer parameters, or of the ranks' mean."""
        for name, parameter in sorted(self.module.named_parameters()):
            value = self._outer.get(name, parameter).detach()
            if name in self._trained and not self._outer and not self._just_met(name):
                (value,) = means_over_ranks([value])
            yield name, lossless_copy(value)

    def _just_met(self, name: str) -> bool:
        """Whether all ranks have the same, to the last bit, which their mean need not."""
        steps = self._steps_called
        return not steps or self.local_steps.is_due(self._fragment_of[name], steps)

    def full_gradients(self) -> dict[str, Tensor]:
        """The mean of the ranks' own."""
        own = super().full_gradients()
        gathered = {name: self._gathered({"": own.get(name)}) for name in self._trained}
        return {name: mean[""] for name, mean in gathered.items() if mean}

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """The mean of the ranks' own, beside the outer optimizer's."""
        whole = {name: self._gathered(own) for name, own in super().full_optimizer_state().items()}
        if self._outer_optimizer is not None:
            for name, parameter in self._outer.items():
                state = self._outer_optimizer.state.get(parameter, {})
                whole[name] |= {f"outer_{k}": v.cpu() for k, v in state.items() if v is not None}
        return whole

    def _gathered(self, own: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """By key, the sum over the ranks that have it, divided by all ranks."""
        held = {key: value for key, value in own.items() if value is not None}
        ranks = cast("list[dict[str, Tensor]]", self.group.gather(held))
        keys = dict.fromkeys(key for rank in ranks for key in rank)
        sums = {key: torch.stack([r[key] for r in ranks if key in r]).sum(0) for key in keys}
        return {key: total / len(ranks) for key, total in sums.items()}

    def held_state(self) -> HeldState:
        held = super().held_state()
        outer = () if self._outer_optimizer is None else state_tensors(self._outer_optimizer)
        return replace(
            held,
            parameters=(*held.parameters, *self._outer.values()),
            optimizer_state=(*held.optimizer_state, *outer),
        )


@torch.no_grad()
def means_over_ranks(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Of fp32 tensors, element by element; they share one buffer.  Collective."""
    given = list(tensors)
    together = torch.cat([tensor.reshape(-1) for tensor in given])
    dist.all_reduce(together)
    together /= dist.get_world_size()
    parts = torch.split(together, [tensor.numel() for tensor in given])
    return [part.view_as(tensor) for part, tensor in zip(parts, given, strict=True)]
