"""Models that are made up, so that nothing has to be traced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardmark.base.errors import StrategyUnavailable
from shardmark.base.layout import REPLICATED_ACTIVATIONS, ActivationSharding
from shardmark.base.recipe import Recipe
from shardmark.base.traffic import ModelSize
from shardmark.predict.models import Models, Steps
from shardmark.predict.profile import Amount, Moment, Operation, Profile, Unit
from shardmark.ranks.trial import Trial
from shardmark.ranks.workloads.options import WorkloadOptions

if TYPE_CHECKING:
    from shardmark.ranks.workloads.base import Workload

MB = 10**6


def made_profile(
    *,
    units: int = 4,
    million_parameters: float = 250.0,
    sample_bytes: float = 100 * MB,
    gigaflops: float = 1000,
) -> Profile:
    """A forward pass of so many FLOP a sample and unit, a backward pass of twice as many, and
    activations of equal size in each unit."""
    parameters = int(million_parameters * 1e6 / units)
    kept = Amount(per_sample=sample_bytes / units)

    def product(times: int) -> tuple[Operation, ...]:
        return (Operation(kind="product", flops=Amount(per_sample=times * gigaflops * 1e9)),)

    unit = Unit(
        name="block",
        parameters=parameters,
        trained_parameters=parameters,
        forward=product(1),
        backward=product(2),
        saved_bytes=kept,
        backward_moments=(Moment(bytes=Amount(per_sample=sample_bytes)),),
    )
    size = ModelSize(parameters=units * parameters, trained_parameters=units * parameters)
    return Profile(units=(unit,) * units, size=size, state_values=2)


class MadeModels(Models):
    def __init__(self, made: Profile | None = None, samples: int | None = 50_000) -> None:
        super().__init__()
        self._made = made or made_profile()
        self._count = samples

    def profile(
        self,
        options: WorkloadOptions,  # noqa: ARG002
        recipe: Recipe,  # noqa: ARG002
        *,
        device_type: str = "cuda",  # noqa: ARG002
        activations: ActivationSharding = REPLICATED_ACTIVATIONS,  # noqa: ARG002
        steps: Steps = "both",  # noqa: ARG002
    ) -> Profile:
        return self._made

    def untraced(self, cell: Trial) -> Profile:  # noqa: ARG002
        units = (
            replace(unit, saved_bytes=Amount(), backward_moments=()) for unit in self._made.units
        )
        return replace(self._made, units=tuple(units))

    def state_exceeds(self, cell: Trial, room_bytes: float) -> bool:  # noqa: ARG002
        return False

    def check(self, cell: Trial, world_size: int, nodes: int) -> None:
        """64 layers, each of which can be divided by 64."""
        layout = cell.built_strategy.layout(world_size, nodes)
        for parts in (layout.tensor, layout.pipeline):
            if 64 % parts:
                raise StrategyUnavailable("made", f"no {parts} parts", "use 64")

    def activation_traffic(self, cell: Trial, world_size: int, nodes: int) -> Mapping[str, Any]:
        layout = cell.built_strategy.layout(world_size, nodes)
        divided: dict[str, Any] = (
            {"divided": {"in": 10**6, "out": 10**6}} if layout.tensor > 1 else {}
        )
        return divided | ({"between_stages_bytes": 4 * 10**6} if layout.pipeline > 1 else {})

    def training_samples(self, options: WorkloadOptions) -> int | None:  # noqa: ARG002
        return self._count


def trace(workload: Workload, recipe: Recipe, **options: Any) -> Profile:
    """Trace a step under autocast and, in 16 bits, another one with cast parameters."""
    from shardmark.predict.trace.trace import traced

    profile = traced(workload, recipe, **options)
    assert profile is not None, "without casts an error is raised"
    if recipe.precision == "fp32":
        return profile
    return replace(profile, native=traced(workload, recipe, casts=True, **options))
