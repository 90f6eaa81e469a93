"""The memory model: predicts the bytes of a rank at the moment of a step at which it holds most."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardmark.base.layout import Layout
from shardmark.base.recipe import Recipe
from shardmark.predict.hardware.catalogue import Card, GiB
from shardmark.predict.profile import Amount, Profile, Unit, values_of
from shardmark.ranks.costs import cost_model
from shardmark.ranks.costs.base import FP32_BYTES, Cell, StepState, UnitState
from shardmark.ranks.strategies.base import Strategy

Array = NDArray[np.float64]
Bytes = TypeVar("Bytes", float, Array)


class Allowance(NamedTuple):
    """Memory of a CUDA device beside tensors, if so much or so little is needed."""

    context_bytes: float
    """Context, libraries and NCCL."""
    reserved: float
    """Memory that the caching allocator and cuDNN's workspaces reserve, over that of tensors."""

    def needed_bytes(self, tensor_bytes: Bytes) -> Bytes:
        return self.context_bytes + self.reserved * tensor_bytes


LEAST = Allowance(0.4 * GiB, 1.02)
USUAL = Allowance(0.6 * GiB, 1.16)
MOST = Allowance(2.0 * GiB, 1.25)
"""Near the end of the memory the allocator frees what it holds, and cuDNN takes smaller workspaces:
runs end at the least, others at the most.  Sources are in `docs/method/prediction.md`."""
USABLE = 0.985
"""Fraction of a card's memory that the driver leaves."""
Fit = Literal["yes", "tight", "no"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of tensors by part, at the moment of a step at which a rank holds most."""

    parameters: float
    gradients: float
    optimizer_state: float
    gathered: float
    """Parameters of units that are gathered for their computation, and their messages."""
    buffers: float
    """Buffers of communication and of the model; on a CPU also the data set."""
    activations: float
    """The batch, and tensors that the forward pass saves for the backward pass."""
    temporary: float
    on_host: float = 0.0
    """Bytes of offloaded state in the host's memory, which count in no other part."""

    @property
    def peak_bytes(self) -> float:
        return float(peak_bytes({field.name: getattr(self, field.name) for field in fields(self)}))

    def device_bytes(self, device_type: str) -> float:
        """Memory that a device of that type needs for these tensors."""
        return needed_bytes(self.peak_bytes, device_type)


def needed_bytes(tensor_bytes: Bytes, device_type: str, allowance: Allowance = USUAL) -> Bytes:
    """Memory that a device needs for so many bytes of tensors; a CPU needs no more."""
    return tensor_bytes if device_type == "cpu" else allowance.needed_bytes(tensor_bytes)


def usable_bytes(card: Card) -> float:
    """Memory of a card for context and tensors."""
    return card.usable_bytes * (1.0 if card.device_type == "cpu" else USABLE)


def fit_of(tensor_bytes: float, card: Card) -> Fit:
    """Return `tight` if it depends on the allocator and libraries that so many bytes fit."""
    room, device_type = usable_bytes(card), card.device_type
    if needed_bytes(tensor_bytes, device_type, MOST) <= room:
        return "yes"
    return "tight" if needed_bytes(tensor_bytes, device_type, LEAST) <= room else "no"


def peak_bytes(parts: Mapping[str, Any]) -> Any:
    """Sum the bytes by field of `RankMemory` that are in the device's memory."""
    return sum(count for name, count in parts.items() if name != "on_host")


class MemoryColumn(NamedTuple):
    """Model state and numbers of one layout that a rank's memory depends on."""

    state: StepState
    samples: float
    """Samples of a pass on each rank."""
    passes: int
    in_flight: float
    """Fraction of a pass's samples whose activations exist at once."""
    tensor: int
    slices: float
    """Ranks that divide the activations of a sample: by positions, or by stages."""
    imbalance: float
    """Parameters of the largest pipeline stage over the mean."""


def rank_memory(
    profile: Profile,
    strategy: Strategy,
    recipe: Recipe,
    world_size: int,
    *,
    nodes: int = 1,
    device_type: str = "cuda",
) -> RankMemory:
    """Predict the memory of the training rank that holds most."""
    reference_bytes = profile.reference_bytes
    profile = computed(profile, strategy, recipe)
    cell = Cell(
        size=profile.size,
        units=profile.units,
        recipe=recipe,
        world_size=world_size,
        nodes=nodes,
        device_type=device_type,
    )
    costs = cost_model(strategy)
    layout = strategy.layout(world_size, nodes)
    column = memory_column(cell, layout, costs.step_state(cell), costs.in_flight(cell))
    parts = largest_moments(profile, [column])
    byte_counts = {name: float(count[0]) for name, count in parts.items()}
    byte_counts["parameters"] += layout.ranks[0].holds.parameters * reference_bytes
    return RankMemory(**byte_counts)


def computed(profile: Profile, strategy: Strategy, recipe: Recipe) -> Profile:
    """Return the profile of 16-bit parameters if the strategy computes with them."""
    native = profile.native
    return native if native is not None and computes_natively(strategy, recipe) else profile


def computes_natively(strategy: Strategy, recipe: Recipe) -> bool:
    """True if forward and backward passes use 16-bit parameters without autocast."""
    return recipe.weights != "fp32" or strategy.numerics(recipe).casts is not None


def memory_column(cell: Cell, layout: Layout, state: StepState, in_flight: float) -> MemoryColumn:
    """Return the numbers of one layout; of `layout` only its sizes are read."""
    passes = cell.recipe.gradient_accumulation
    return MemoryColumn(
        state=state,
        samples=cell.samples(layout.shares) / passes,
        passes=passes,
        in_flight=in_flight,
        tensor=layout.tensor,
        slices=layout.sequence * layout.pipeline / cell.size.stage_compute_imbalance,
        imbalance=cell.size.stage_parameter_imbalance,
    )


_FIELDS = [field.name for field in fields(UnitState)]
_bytes_of = attrgetter(*_FIELDS)
_NO_BYTES, _ALWAYS = -2, -1
"""Columns that follow the fields of a unit's state: 0 and 1."""


class _Moments(NamedTuple):
    """The moments of a step but the update at which a rank may hold most, a row for each."""

    live: Array
    """Columns: the numbers of the live bytes' `Amount`."""
    unit: Array
    saved: Array
    """Number of units whose saved activations exist."""
    gathered: Array
    """Field of the unit's state that exists."""
    copied: Array
    """The same of another one."""
    only_if: Array
    """Field of the unit's state that has to exist."""
    fresh: Array
    """Bytes of the unit's gradients."""
    in_backward: Array


def _moments(profile: Profile) -> Iterator[tuple[Amount, int, int, int, int, int, float, bool]]:
    """Yield the rows in order of time."""
    entering_forward, forward, entering_backward, backward, copied, reducing = map(
        _FIELDS.index,
        ("entering_forward", "forward", "entering_backward", "backward", "copied", "reducing"),
    )
    always, none = (_NO_BYTES, _ALWAYS), _NO_BYTES
    for at, unit in enumerate(profile.units):
        yield unit.begun_bytes, at, at, entering_forward, *always, 0.0, False
        for moment in unit.forward_moments:
            yield moment.bytes, at, at + 1, forward, *always, 0.0, False
    for at, unit in reversed([*enumerate(profile.units)]):
        saved = at + 1
        yield unit.entered_bytes, at, saved, entering_backward, *always, 0.0, True
        for moment in unit.backward_moments:
            yield moment.bytes, at, saved, backward, *always, moment.gradient_bytes, True
        for moment in unit.gradient_moments:
            yield moment.bytes, at, saved, backward, copied, copied, moment.gradient_bytes, True
        gradients = unit.gradient_bytes or FP32_BYTES * unit.trained_parameters
        yield unit.reduced_bytes, at, saved, reducing, none, reducing, gradients, True


_recent_tables: deque[tuple[tuple[Unit, ...], _Moments]] = deque(maxlen=8)
"""Tables of the last profiles: a search asks for the memory of one model many times."""


def _table_of(profile: Profile) -> _Moments:
    for units, table in _recent_tables:
        if units is profile.units:
            return table
    live, *others, fresh, in_backward = zip(*_moments(profile), strict=True)
    columns = [np.array([*map(values_of, live)]), *map(np.array, others)]
    table = _Moments._make([*columns, *(np.array(one)[:, None] for one in (fresh, in_backward))])
    _recent_tables.append((profile.units, table))
    return table


def largest_moments(profile: Profile, columns: Sequence[MemoryColumn]) -> dict[str, Array]:
    """Bytes of each layout at the moment with most, by field of `RankMemory`.

    All layouts have the same profile.
    """
    states = {id(column.state): column.state for column in columns}
    positions = {key: at for at, key in enumerate(states)}
    state_of_column = [positions[id(column.state)] for column in columns]
    samples, passes, in_flight, tensor, slices, imbalance = (
        np.array(numbers, dtype=np.float64)
        for numbers in zip(*(column[1:] for column in columns), strict=True)
    )

    def of_states(value: Callable[[StepState], Any]) -> Array:
        return np.array([value(state) for state in states.values()], dtype=np.float64)[
            state_of_column
        ]

    def on_ranks(amounts: Array, samples: Array) -> Array:
        fixed, per_sample, replicated = amounts.T[:, :, None]
        result: Array = (replicated + (1 - replicated) / tensor) * (fixed + per_sample * samples)
        return result

    unit_bytes = of_states(lambda state: [(*_bytes_of(unit), 0, 1) for unit in state.units])
    unit_bytes = unit_bytes.transpose(1, 2, 0)  # (units, fields, layouts)
    retained = unit_bytes[:, _FIELDS.index("retained_gradients")]
    retained_later = np.cumsum(retained[::-1], axis=0)[::-1] - retained
    table = _table_of(profile)
    units = table.unit
    amounts = [profile.batch_bytes, *(unit.saved_bytes for unit in profile.units)]
    saved = np.cumsum(on_ranks(np.array([*map(values_of, amounts)]), in_flight * samples), axis=0)

    trained = profile.size.trained_parameters
    largest = max((size for unit in profile.units for size in unit.sizes), default=0)
    on_host = of_states(lambda state: state.host is not None) > 0
    fp32_values = FP32_BYTES * of_states(lambda state: state.optimizer_share)
    together = of_states(lambda state: profile.updates_together or state.flat_update)
    updated = np.where(on_host, 0.0, np.where(together > 0, trained, largest))
    state_gradients = of_states(lambda state: state.gradients)
    updating = of_states(
        lambda state: np.nan if state.updating is None else state.updating - state.gradients
    )
    live = np.vstack(
        [
            on_ranks(table.live, in_flight * samples),
            saved[:1] + slices * profile.update_values * fp32_values * updated,
        ]
    )
    saved_bytes = np.vstack([saved[table.saved], saved[:1]])
    gathered = np.vstack(
        [
            unit_bytes[units, table.gathered] + unit_bytes[units, table.copied],
            np.zeros_like(samples),
        ]
    )
    gradients = np.vstack(
        [
            table.in_backward * retained_later[units]
            + of_states(lambda state: state.fresh_gradients) * table.fresh,
            np.where(np.isnan(updating), retained.sum(axis=0), updating),
        ]
    )
    total = live / slices + gathered + gradients
    exists = unit_bytes[units, table.only_if] != 0
    total[:-1][~exists] = -np.inf
    at = total.argmax(axis=0), np.arange(len(columns))
    saved_live = np.minimum(live[at], saved_bytes[at])
    values = imbalance * fp32_values * profile.state_values * trained
    return {
        "on_host": np.where(
            on_host,
            of_states(lambda state: state.host.resident if state.host else 0.0) + values,
            0.0,
        ),
        "parameters": imbalance * of_states(lambda state: state.parameters),
        "gradients": imbalance * (state_gradients + gradients[at]),
        "optimizer_state": imbalance * of_states(lambda state: state.optimizer_state)
        + np.where(on_host, 0.0, values),
        "gathered": gathered[at],
        "buffers": of_states(lambda state: state.buffers)
        + profile.buffer_bytes
        + profile.data_bytes,
        "activations": (passes - 1)
        * (profile.batch_bytes.fixed + profile.batch_bytes.per_sample * samples)
        + saved_live / slices,
        "temporary": (live[at] - saved_live) / slices,
    }
