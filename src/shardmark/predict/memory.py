"""Memory of a rank at the fullest moment of a step, from a traced profile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from shardmark.core.layout import Layout
from shardmark.core.recipe import Recipe
from shardmark.costs import cost_model
from shardmark.costs.base import FP32_BYTES, Cell, StepState
from shardmark.predict.profile import Profile
from shardmark.strategies.base import Strategy, samples_of_share

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

Sized = TypeVar("Sized", float, "NDArray[float64]")
GiB = 2**30
CONTEXT_BYTES = 2.0 * GiB
FRAGMENTATION = 1.136
"""What a CUDA device has to hold beside tensors: context, libraries and NCCL; and blocks that the
allocator keeps.  A fit of nine published rows of one A100, for others a guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of tensors by part, at the fullest moment of a step."""

    parameters: float
    gradients: float
    optimizer_state: float
    gathered: float
    """Parameters of units that are whole for their computation, and messages with them."""
    buffers: float
    """Of communication, and of the model itself; on a CPU those of the data set."""
    activations: float
    """The batch, and what the forward pass keeps for the backward pass."""
    temporary: float
    on_host: float = 0.0
    """Of the host's memory, where the state is offloaded; in no other part."""

    @property
    def peak_bytes(self) -> float:
        state = self.parameters + self.gradients + self.optimizer_state
        return state + self.gathered + self.buffers + self.activations + self.temporary

    def device_bytes(self, device_type: str) -> float:
        """What a device of that type needs for it."""
        return needed_bytes(self.peak_bytes, device_type)


def needed_bytes(tensors: Sized, device_type: str) -> Sized:
    """Of a device for so many bytes of tensors; of a CPU's memory no more."""
    return tensors if device_type == "cpu" else CONTEXT_BYTES + FRAGMENTATION * tensors


def rank_memory(
    profile: Profile,
    strategy: Strategy,
    recipe: Recipe,
    world_size: int,
    *,
    nodes: int = 1,
    device_type: str = "cuda",
) -> RankMemory:
    """The training rank that holds most."""
    profile = computed(profile, strategy, recipe)
    layout = strategy.layout(world_size, nodes)
    costs = cost_model(strategy)
    cell = Cell(
        size=profile.size,
        units=profile.units,
        recipe=recipe,
        world_size=world_size,
        nodes=nodes,
        device_type=device_type,
    )
    state, in_flight = costs.step_state(cell), costs.in_flight(cell)
    return fullest(profile, layout, state, recipe, in_flight=in_flight)


def computed(profile: Profile, strategy: Strategy, recipe: Recipe) -> Profile:
    """With cast parameters, where the strategy casts them."""
    native = profile.native
    return native if native is not None and strategy.numerics(recipe).casts else profile


def fullest(
    profile: Profile, layout: Layout, state: StepState, recipe: Recipe, *, in_flight: float = 1.0
) -> RankMemory:
    """The moment of a step at which a rank with that state holds most; only sizes of the layout
    count."""
    passes = recipe.gradient_accumulation
    in_a_pass = samples_of_share(recipe, layout.shares) / passes
    samples = in_flight * in_a_pass
    divided = layout.sequence * layout.pipeline / profile.size.stage_compute_imbalance
    uneven = profile.size.stage_parameter_imbalance
    moments = _moments(profile, state, samples, layout.tensor, divided)
    at = max(moments, key=lambda at: at.live / divided + at.gathered + at.gradients)
    kept = min(at.live, at.saved)
    values = uneven * state.optimizer_share * profile.state_values * profile.size.trained_parameters
    on_host = state.host is not None
    return RankMemory(
        on_host=0.0 if state.host is None else state.host.resident + FP32_BYTES * values,
        parameters=uneven * state.parameters,
        gradients=uneven * (state.gradients + at.gradients),
        optimizer_state=uneven * state.optimizer_state + (0.0 if on_host else FP32_BYTES * values),
        gathered=at.gathered,
        buffers=state.buffers + profile.buffer_bytes + profile.data_bytes,
        activations=(passes - 1) * profile.batch_bytes.at(in_a_pass) + kept / divided,
        temporary=(at.live - kept) / divided,
    )


class _At(NamedTuple):
    """Bytes at one moment, those of activations before sequences and stages are divided."""

    live: float
    saved: float
    """Of them for the backward pass."""
    gathered: float
    gradients: float


def _moments(
    profile: Profile, state: StepState, samples: float, tensor: int, divided: float
) -> Iterator[_At]:
    saved = [profile.batch_bytes.at(samples, tensor)]
    for unit, held in zip(profile.units, state.units, strict=True):
        yield _At(unit.begun_bytes.at(samples, tensor), saved[-1], held.entering_forward, 0.0)
        saved.append(saved[-1] + unit.saved_bytes.at(samples, tensor))
        for moment in unit.forward_moments:
            yield _At(moment.bytes.at(samples, tensor), saved[-1], held.forward, 0.0)
    gradients = 0.0
    backwards = zip(profile.units, state.units, saved[1:], strict=True)
    for unit, held, kept in reversed([*backwards]):
        yield _At(unit.entered_bytes.at(samples, tensor), kept, held.entering_backward, gradients)
        for moment in unit.backward_moments:
            fresh = gradients + state.fresh_gradients * moment.gradient_bytes
            yield _At(moment.bytes.at(samples, tensor), kept, held.backward, fresh)
        for moment in unit.gradient_moments if held.copied else ():
            fresh = gradients + state.fresh_gradients * moment.gradient_bytes
            yield _At(moment.bytes.at(samples, tensor), kept, held.backward + held.copied, fresh)
        if held.reducing:
            own = unit.gradient_bytes or FP32_BYTES * unit.trained_parameters
            whole = gradients + state.fresh_gradients * own
            yield _At(unit.reduced_bytes.at(samples, tensor), kept, held.reducing, whole)
        gradients += held.retained_gradients
    trained = profile.size.trained_parameters
    largest = max((size for unit in profile.units for size in unit.sizes), default=0)
    together = profile.updates_together or state.flat_update
    updated = state.optimizer_share * (trained if together else largest)
    if state.host is not None:
        updated = 0.0
    if state.updating is not None:
        gradients = state.updating - state.gradients
    temporary = divided * profile.update_values * FP32_BYTES * updated
    yield _At(saved[0] + temporary, saved[0], 0.0, gradients)
