"""Strategies that synchronise parameters once in many local steps: local SGD and DiLoCo."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from shardmark.base.errors import StrategyUnavailable
from shardmark.base.layout import Fractions, Layout, data_parallel
from shardmark.base.machine import Machine
from shardmark.base.numerics import LocalSteps, Numerics, OuterOptimizer
from shardmark.ranks.strategies.base import RankContext, Strategy, check_machine, common_settings

if TYPE_CHECKING:
    from shardmark.base.recipe import Recipe
    from shardmark.extras.local_steps.worker import LocalWorker
    from shardmark.ranks.workloads.base import Workload

PERIOD_STEPS = 20
"""Default period.  The papers use up to 500, in longer trainings than those measured here."""
PROOF_PERIOD_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStepsStrategy(Strategy):
    """Common part of both: the recipe's optimizer takes steps on each rank independently."""

    refuses_after_step = "ranks have different weights between rounds"

    period_steps: Annotated[int, Field(ge=1)] = PERIOD_STEPS
    """Number of local steps of each rank between two synchronisations."""

    @abstractmethod
    def local_steps(self) -> LocalSteps:
        """Schedule of the synchronisations, and the optimizer that they apply."""

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        reason = "its ranks do not communicate in every step, for batch norm neither"
        check_machine(self.name, world_size, machine, recipe, no_sync_batch_norm=reason)
        if recipe.steps is not None and recipe.steps < self.period_steps:
            raise StrategyUnavailable(
                self.name,
                f"{recipe.steps} steps end before the first synchronisation,"
                f" after {self.period_steps}",
                f"set its period_steps to at most {recipe.steps}, or train longer",
            )

    def numerics(self, recipe: Recipe) -> Numerics:
        return Numerics(local_steps=self.local_steps())

    def proof_options(self) -> Mapping[str, Any]:
        """Rounds of two steps, so that a few steps contain several rounds."""
        return {"period_steps": min(self.period_steps, PROOF_PERIOD_STEPS)}

    def settings(self, recipe: Recipe) -> Mapping[str, object]:
        reduction = f"none: each rank updates by its own; all meet every {self.period_steps} steps"
        return (
            common_settings(recipe)
            | {"gradient_reduction": reduction, "gradient_clipping_of": "each rank's own gradient"}
            | asdict(self.local_steps())
        )

    def start(self, workload: Workload, recipe: Recipe, context: RankContext) -> LocalWorker:
        from shardmark.extras.local_steps.worker import LocalWorker
        from shardmark.ranks.strategies.execution import build_on

        model = build_on(context.device, workload, recipe)
        self.check_model(workload, model, context.world_size, context.nodes)
        return LocalWorker(
            model,
            workload=workload,
            recipe=recipe,
            device=context.device,
            shares=context.world_size,  # the step's loss is the mean over the ranks
            weighs_alone=True,
            local_steps=self.local_steps(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSGD(LocalStepsStrategy):
    """Each rank trains alone for a round of steps, then parameters are averaged.

    Source: Stich, ICLR 2019; Lin et al., ICLR 2020.  Evaluations use the average, also between two
    synchronisations.
    """

    costs = "shardmark.extras.local_steps.costs:LocalStepsCosts"

    name: str = "local-sgd"

    def local_steps(self) -> LocalSteps:
        return LocalSteps(period_steps=self.period_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCo(LocalStepsStrategy):
    """Each rank trains alone for a round; an outer optimizer applies the mean of the changes.

    Source: Douillard et al., 2023, algorithm 1.  All ranks continue from the outer parameters.
    Evaluations use them, without the steps after the last synchronisation.
    """

    costs = "shardmark.extras.local_steps.costs:LocalStepsCosts"

    name: str = "diloco"
    outer_learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.7
    """Learning rate of SGD on the outer parameters; its three options have the paper's values."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    outer_nesterov: bool = True
    fragments: Annotated[int, Field(ge=1)] = 1
    """Groups of parameters that are synchronised in turn within a round, so that each message is
    smaller (Streaming DiLoCo: Douillard et al., 2025, without overlap and quantisation)."""

    def local_steps(self) -> LocalSteps:
        return LocalSteps(
            period_steps=self.period_steps,
            fragments=self.fragments,
            outer=OuterOptimizer(
                learning_rate=self.outer_learning_rate,
                momentum=self.outer_momentum,
                nesterov=self.outer_nesterov and self.outer_momentum > 0,
            ),
        )

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        LocalStepsStrategy.check(self, world_size, machine, recipe)
        if self.fragments > self.period_steps:
            raise StrategyUnavailable(
                self.name,
                f"{self.fragments} fragments need more than the {self.period_steps} steps a round",
                "set fragments to at most its period_steps",
            )

    def proof_options(self) -> Mapping[str, Any]:
        shortened = LocalStepsStrategy.proof_options(self)["period_steps"]
        return {"period_steps": min(self.period_steps, max(shortened, self.fragments))}

    def layout(self, world_size: int, nodes: int = 1) -> Layout:
        """Layout with local and outer parameters; the outer momentum is not counted."""
        return data_parallel(world_size, nodes=nodes, holds=Fractions(parameters=2.0))
