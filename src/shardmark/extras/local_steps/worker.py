"""A worker that trains alone and meets the others at the end of a round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmark.base.numerics import LocalSteps
from shardmark.ranks.strategies.base import HeldState
from shardmark.ranks.strategies.casting import lossless_copy
from shardmark.ranks.strategies.step import EagerWorker, refuse_switched_weights, state_tensors


@dataclass(kw_only=True, eq=False)
class LocalWorker(EagerWorker):
    """Trains its own parameters with its own optimizer; outer parameters are equal on all ranks."""

    local_steps: LocalSteps

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_switched_weights("local steps", self._optimizer)
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
        """Set the parameters to the mean over the ranks, or to the outer optimizer's result."""
        parameters = [self._trained[name] for name in names]
        values: Sequence[Tensor] = means_over_ranks(parameters)
        if self._outer_optimizer is not None:
            outer = [self._outer[name] for name in names]
            for parameter, mean in zip(outer, values, strict=True):
                parameter.grad = parameter - mean
            self._outer_optimizer.step()  # skips the other fragments, which have no gradients
            self._outer_optimizer.zero_grad(set_to_none=True)
            values = outer
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)

    def round_steps(self) -> int:
        return self.local_steps.period_steps

    def end_rounds(self) -> None:
        self._every_step = True

    def each_parameter(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the outer parameters, or over the mean of the ranks' parameters."""
        for name, parameter in sorted(self.module.named_parameters()):
            value = self._outer.get(name, parameter).detach()
            if name in self._trained and not self._outer and not self._just_synchronised(name):
                (value,) = means_over_ranks([value])
            yield name, lossless_copy(value)

    def _just_synchronised(self, name: str) -> bool:
        """True if all ranks have bitwise equal parameters; their computed mean may differ."""
        steps = self._steps_called
        return not steps or self.local_steps.is_due(self._fragment_of[name], steps)

    def full_gradients(self) -> dict[str, Tensor]:
        """Mean of the ranks' gradients."""
        gradients = super().full_gradients()
        gathered = {name: self._mean({"": gradients.get(name)}) for name in self._trained}
        return {name: mean[""] for name, mean in gathered.items() if mean}

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Mean of the ranks' optimizer states, and the outer optimizer's state."""
        means = {name: self._mean(state) for name, state in super().full_optimizer_state().items()}
        if self._outer_optimizer is not None:
            for name, parameter in self._outer.items():
                state = self._outer_optimizer.state.get(parameter, {})
                means[name] |= {f"outer_{k}": v.cpu() for k, v in state.items() if v is not None}
        return means

    def _mean(self, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Mean over all ranks by key; a rank without the key counts as zero."""
        present = {key: value for key, value in tensors.items() if value is not None}
        ranks = cast("list[dict[str, Tensor]]", self.group.gather(present))
        keys = dict.fromkeys(key for rank in ranks for key in rank)
        sums = {key: torch.stack([r[key] for r in ranks if key in r]).sum(0) for key in keys}
        return {key: total / len(ranks) for key, total in sums.items()}

    def held_state(self) -> HeldState:
        state = super().held_state()
        outer = () if self._outer_optimizer is None else state_tensors(self._outer_optimizer)
        return replace(
            state,
            parameters=(*state.parameters, *self._outer.values()),
            optimizer_state=(*state.optimizer_state, *outer),
        )


@torch.no_grad()
def means_over_ranks(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the elementwise means of fp32 tensors as views of one buffer.  Collective."""
    inputs = list(tensors)
    together = torch.cat([tensor.reshape(-1) for tensor in inputs])
    dist.all_reduce(together)
    together /= dist.get_world_size()
    parts = torch.split(together, [tensor.numel() for tensor in inputs])
    return [part.view_as(tensor) for part, tensor in zip(parts, inputs, strict=True)]
