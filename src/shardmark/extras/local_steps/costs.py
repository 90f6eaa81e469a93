"""Costs of local steps between synchronisations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardmark.base.traffic import RequiredTraffic, Traffic
from shardmark.extras.local_steps.strategy import LocalStepsStrategy
from shardmark.ranks.costs.base import Cell, Costs, StepState


class LocalStepsCosts(Costs[LocalStepsStrategy]):
    """Costs of one synchronisation of all parameters in each round of local steps."""

    def required_traffic(self, cell: Cell) -> RequiredTraffic:
        """Mean traffic of a step: a round sends as much as one step of DDP."""
        period = self.strategy.period_steps
        synchronisation = Traffic(
            kind="all_reduce",
            payload_bytes=cell.size.trained_parameters * cell.weight_bytes / period,
            ranks=cell.world_size,
            waited_for=True,
            every_steps=period / self.strategy.local_steps().fragments,
        )
        return RequiredTraffic(
            traffic=(synchronisation,),
            formula=f"all-reduce once in {period} steps: 2 (n-1)/n G / {period}",
        )

    def library_work(self, cell: Cell) -> Mapping[str, float]:
        local_steps, frequency = self.strategy.local_steps(), 1 / self.strategy.period_steps
        outer_tensors = cell.size.trained_tensors * (local_steps.outer is not None)
        return {
            **super().library_work(cell),
            "meeting": frequency * local_steps.fragments,
            "outer tensor": frequency * outer_tensors,
        }

    def step_state(self, cell: Cell) -> StepState:
        """Gradients are freed after the update; a synchronisation then holds the mean.

        An outer optimizer has gradients of its own during a synchronisation, and its momentum all
        the time.
        """
        total = cell.weight_bytes * cell.all_trained_parameters
        local_steps = self.strategy.local_steps()
        outer = local_steps.outer
        synchronising = (1 if outer is None else 2) * total / local_steps.fragments
        return replace(
            super().step_state(cell),
            optimizer_state=total if outer is not None and outer.momentum else 0.0,
            updating=max(total, synchronising),
        )
