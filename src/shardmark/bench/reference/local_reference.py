"""The reference of local SGD and DiLoCo: one reference per rank, synchronised periodically."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from shardmark.bench.reference.reference import Reference


class LocalReference(Reference):
    """A reference in which each rank has its own parameters, optimizer and loss scale.

    The parameters of this object are the outer ones, or the mean of the ranks without an outer
    optimizer.  For a hypothesis with `only_rank` they are that rank's parameters.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.numerics.local_steps is not None, "ReferenceRuns checks it"
        self._local_steps = self.numerics.local_steps
        sizes = {name: parameter.numel() for name, parameter in self._named.items()}
        self._fragments = self._local_steps.assign_fragments(sizes)
        self._momentum: dict[str, Tensor] = {}
        self._synchronised_once: set[str] = set()
        arguments = {field.name: getattr(self, field.name) for field in fields(Reference)}
        arguments["hypothesis"] = replace(self.hypothesis, only_rank=None)
        self._ranks = [Reference(**arguments | {"ranks": [rank]}) for rank in range(self.shares)]
        self.sample_ids = [rank.sample_ids[0] for rank in self._ranks]
        self.weights = [rank.weights[0] for rank in self._ranks]
        self.draws = [rank.draws[0] for rank in self._ranks]

    def step(self) -> list[Tensor]:
        losses = []
        for index, rank in enumerate(self._ranks):
            self._current_alone = index
            losses += rank.step()
        self.steps_taken += 1
        self.skipped = sorted({step for rank in self._ranks for step in rank.skipped})
        self._buffers = [dict(rank.buffers()) for rank in self._ranks]
        self.gradients = _means([rank.gradients for rank in self._ranks])
        for number, names in enumerate(self._fragments):
            if self._local_steps.is_due(number, self.steps_taken):
                for name in names:
                    self._synchronise(name)
        return losses

    @torch.no_grad()
    def _synchronise(self, name: str) -> None:
        """Set a parameter of all ranks to their mean, or to the outer optimizer's update of it."""
        parameter, outer = self._named[name], self._local_steps.outer
        first = name not in self._synchronised_once
        self._synchronised_once.add(name)
        mean = self._mean(name, self.hypothesis.first_round_of if first else None)
        if outer is None:
            parameter.copy_(mean)
        else:
            change = parameter - mean
            momentum = outer.momentum * self._momentum.get(name, 0.0) + change
            self._momentum[name] = momentum
            ahead = change + outer.momentum * momentum if outer.nesterov else momentum
            parameter.sub_(outer.learning_rate * ahead)
        for rank in self._ranks:
            rank._named[name].copy_(parameter)

    def _mean(self, name: str, only_rank: int | None = None) -> Tensor:
        """Mean of a parameter over the ranks, or its value on one rank."""
        only_rank = self.hypothesis.only_rank if only_rank is None else only_rank
        ranks = self._ranks if only_rank is None else [self._ranks[only_rank]]
        return torch.stack([rank._named[name].detach() for rank in ranks]).mean(0)

    def full_parameters(self) -> dict[str, Tensor]:
        if self._local_steps.outer is None:
            with torch.no_grad():
                for name, parameter in self._named.items():
                    parameter.copy_(self._mean(name))
        return super().full_parameters()

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Mean of the ranks' optimizer states, and the outer momentum."""
        ranks = [rank.optimizer_state() for rank in self._ranks]
        state = {name: _means([rank[name] for rank in ranks]) for name in self._named}
        for name, momentum in self._momentum.items():
            if self._local_steps.outer is not None and self._local_steps.outer.momentum:
                state[name]["outer_momentum_buffer"] = momentum
        return state

    def skipped_by_share(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(rank.skipped) for rank in self._ranks)


def _means(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Sum of each tensor over the ranks that have it, divided by the number of all ranks."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    tensors = {name: [rank[name] for rank in ranks if name in rank] for name in names}
    return {name: torch.stack(stacked).sum(0) / len(ranks) for name, stacked in tensors.items()}
