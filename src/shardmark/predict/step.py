"""The step model: predicts the time of an optimizer step under one layout or many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from shardmark.base.layout import Layout
from shardmark.base.recipe import Recipe
from shardmark.predict.hardware.catalogue import NodeType
from shardmark.predict.library import library_seconds, small_operations
from shardmark.predict.memory import computed
from shardmark.predict.profile import Operation, Profile
from shardmark.predict.timing import (
    Constants,
    Numbers,
    collective_seconds,
    copy_seconds,
    host_seconds,
    host_seconds_of_pass,
    in_fp8,
    interference,
    operation_seconds,
    update_products_seconds,
    update_seconds,
)
from shardmark.ranks.costs import cost_model
from shardmark.ranks.costs.base import FP32_BYTES, Cell, Costs, HostState
from shardmark.ranks.strategies.base import Strategy

Array = NDArray[np.float64]
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
STREAMS = 4
"""Kinds of communication: gathers ahead of their layers, reductions of gradients, collectives that
the rank waits for, and sends between pipeline stages."""


LAUNCHES = 0.2
"""Launches that take as long as a small operation of a library's own code on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Measured seconds over predicted seconds, from measurements of a machine."""

    compute: float = 1.0
    communication: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step by cause."""

    compute_seconds: float
    """Forward pass, backward pass and update of a rank that runs alone."""
    distribution_seconds: float
    """Extra computing time because several ranks run."""
    bubble_seconds: float
    """Time in which a rank waits for its pipeline to fill and drain."""
    waiting_seconds: float
    """Communication that no computation hides."""
    interference_seconds: float
    """Slowdown of computation by the communication that it hides."""
    library_seconds: float = 0.0
    """The training loop's and the library's own code, if a CPU computes."""
    host_bound: bool = False
    """True if a GPU waits for its host to launch operations or to prepare samples."""

    @property
    def seconds(self) -> float:
        return (
            self.compute_seconds
            + self.distribution_seconds
            + self.bubble_seconds
            + self.waiting_seconds
            + self.interference_seconds
            + self.library_seconds
        )

    @property
    def bound(self) -> str:
        """Name of the cause that takes most of the step."""
        compute = "host" if self.host_bound else "compute"
        seconds = {
            compute: self.compute_seconds + self.distribution_seconds,
            "communication": self.waiting_seconds + self.interference_seconds,
            "pipeline-bubble": self.bubble_seconds,
            "library": self.library_seconds,
        }
        return max(seconds, key=lambda name: seconds[name])


class Column(NamedTuple):
    """Numbers of one layout that its step time depends on; with arrays, those of many layouts."""

    samples: Numbers
    """Samples of a micro-batch on each rank."""
    tensor: Numbers
    sequence: Numbers
    repeats: Numbers
    """Micro-batches of a pass, divided by the stages and multiplied by their imbalance."""
    passes: Numbers
    reducing_passes: Numbers
    """Passes that reduce gradients: the last one, unless the strategy reduces more often."""
    gathers_again: Numbers
    """1 if the backward pass gathers parameters that were freed after the forward pass, else 0."""
    bubble: Numbers
    devices: Numbers
    slowdown: Numbers
    """Slowdown of computation by ranks that share cores."""
    update_seconds: Numbers
    library_operations: Numbers
    """Small operations that take as long as the strategy's own code of a step."""
    library_seconds: Numbers
    driven_devices: Numbers
    """Devices whose operations one process launches."""
    communication_seconds: Sequence[Numbers]
    """Seconds by stream that collectives take on the network."""
    copy_seconds: Sequence[Numbers]
    """Seconds by stream that copies into and out of messages take."""
    host_seconds: Sequence[Numbers]
    """Seconds by stream that copies to and from the host take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Optimizer steps of a model under one or several layouts, before calibration."""

    columns: Column
    """Arrays whose last axis is the layout."""
    host_bound: NDArray[np.bool_]
    """True for layouts whose operations take longer to launch than to compute."""
    forward_seconds: Array
    """Forward pass of each unit, shape (units, layouts)."""
    backward_seconds: Array
    gathered_fractions: Array
    """Fraction of the parameters that each unit has, shape (units, 1)."""
    reduced_fractions: Array
    """Fraction of the trained parameters that each unit has, shape (units, 1)."""
    node: NodeType

    @classmethod
    def of_columns(
        cls,
        columns: Iterable[Column],
        profile: Profile,
        recipe: Recipe,
        node: NodeType,
        constants: Constants,
        *,
        fp8: bool = False,
    ) -> Self:
        """Predict the computation of layouts that have the same profile and precision.

        `fp8` multiplies in 8 bits inside blocks.  Raises `InputError` for a precision that the card
        does not have in hardware.
        """
        stacked = (np.array(numbers, dtype=np.float64).T for numbers in zip(*columns, strict=True))
        table = Column._make(stacked)
        seconds_of = partial(
            _seconds_by_unit,
            samples=table.samples,
            card=node.card,
            recipe=recipe,
            constants=constants,
            tensor=table.tensor,
            sequence=table.sequence,
        )
        full = recipe.activation_checkpointing is True
        forward_operations, repeated_operations, backward_operations = (
            [
                tuple(in_fp8(operations)) if fp8 and block else operations
                for block, operations in of_pass
            ]
            for of_pass in (
                [(unit.block, unit.forward) for unit in profile.units],
                [(unit.block, unit.forward if full else unit.repeated) for unit in profile.units],
                [(unit.block, unit.backward) for unit in profile.units],
            )
        )
        # Chains of compiled code are counted as they are fused.
        is_eager = recipe.compile == "none" and node.card.device_type == "cuda"
        factor = constants.language if is_eager and profile.tokens_per_sample else 1.0
        forward = factor * seconds_of(forward_operations)
        backward = factor * (seconds_of(repeated_operations) + seconds_of(backward_operations))
        # Threads of one process take turns in the forward pass; in the backward pass, each device
        # has a thread of torch's own.
        driven, samples = table.driven_devices, table.samples * table.repeats
        launches = sum(
            driven * (_calls(forwards) + _calls(again)) + _calls(backwards)
            for forwards, again, backwards in zip(
                forward_operations, repeated_operations, backward_operations, strict=True
            )
        )
        launched = host_seconds_of_pass(
            table.repeats * launches
            + (profile.size.trained_tensors + LAUNCHES * table.library_operations) / table.passes,
            np.where(driven > 1, driven, 0) * profile.size.trained_tensors,
            samples * driven if profile.host_prepares_samples else 0.0 * samples,
            node.card,
            constants,
        )
        on_device = (forward + backward).sum(axis=0)
        # The host launches the operations of all units; a device that is faster waits for it.
        host_bound = np.maximum(1.0, launched / np.maximum(table.repeats * on_device, 1e-12))
        scale = table.slowdown * table.repeats * host_bound
        return cls(
            columns=table,
            host_bound=host_bound > 1,
            forward_seconds=scale * forward,
            backward_seconds=scale * backward,
            gathered_fractions=_fractions([unit.parameters for unit in profile.units]),
            reduced_fractions=_fractions([unit.trained_parameters for unit in profile.units]),
            node=node,
        )

    @property
    def communicates(self) -> bool:
        return bool(np.any(self.columns.communication_seconds))

    def time(self, constants: Constants, factors: Factors = Factors()) -> StepTime:
        """Predict the step of the first layout."""
        parts = self._parts(constants, factors.compute, factors.communication)
        return StepTime(
            **{name: float(np.ravel(seconds)[0]) for name, seconds in parts.items()},
            host_bound=bool(np.ravel(self.host_bound)[0]),
        )

    def seconds(self, constants: Constants, compute: Numbers, communication: Numbers) -> Array:
        """Predict the step time of all layouts, or of one layout for arrays of factors."""
        total: Array = sum(self._parts(constants, compute, communication).values(), np.zeros(1))
        return total

    def _parts(
        self, constants: Constants, compute: Numbers, communication: Numbers
    ) -> dict[str, Array]:
        """Seconds of all layouts by field of `StepTime`."""
        numbers = self.columns
        forward, backward = compute * self.forward_seconds, compute * self.backward_seconds[::-1]
        gathered, reduced, waited, between_stages = (
            communication * sent + compute * copied + moved
            for sent, copied, moved in zip(
                numbers.communication_seconds,
                numbers.copy_seconds,
                numbers.host_seconds,
                strict=True,
            )
        )
        again = numbers.gathers_again
        gathers = self.gathered_fractions * (gathered / (numbers.passes * (1 + again)))
        reductions = self.reduced_fractions[::-1] * (reduced / numbers.reducing_passes)
        none = np.zeros_like(reductions)
        computing = [*forward, *backward]
        gathering = [*gathers, *(again * gathers[::-1])]
        quiet_passes = numbers.passes - numbers.reducing_passes
        busy_seconds = numbers.reducing_passes * two_streams(
            computing, gathering, [*none, *reductions]
        )
        if np.any(quiet_passes):
            busy_seconds += quiet_passes * two_streams(computing, gathering, [*none, *none])
        computed = numbers.passes * sum(computing)
        exposed = busy_seconds - computed
        alone = computed + compute * numbers.slowdown * numbers.update_seconds
        pipeline = np.maximum(numbers.bubble * between_stages, between_stages - computed)
        hidden = np.maximum(0.0, gathered + reduced - exposed)
        return {
            "compute_seconds": alone,
            "distribution_seconds": alone
            * distribution_tax(numbers.devices, numbers.passes, constants),
            "bubble_seconds": computed * numbers.bubble,
            "waiting_seconds": exposed + waited + pipeline,
            "interference_seconds": interference(self.node, constants) * hidden,
            "library_seconds": numbers.slowdown * numbers.library_seconds,
        }


def plan_step(
    profile: Profile,
    strategy: Strategy,
    recipe: Recipe,
    world_size: int,
    node: NodeType,
    *,
    nodes: int = 1,
    constants: Constants,
    fp8: bool = False,
) -> Step:
    """Predict a profiled model's step under a strategy.

    `fp8` multiplies in 8 bits inside blocks.  Raises `InputError` for a precision that the card
    does not have in hardware, for a link that is not described, and for a strategy without a cost
    model.
    """
    layout = strategy.layout(world_size, nodes)
    holds = layout.ranks[0].holds
    costs = cost_model(strategy)
    cell = Cell(
        size=profile.size, units=profile.units, recipe=recipe, world_size=world_size, nodes=nodes
    )
    servers = len(layout.server_ranks)
    column = layout_column(
        costs,
        cell,
        layout,
        node,
        constants,
        profile=profile,
        gathers_again=holds.parameters * layout.tensor * layout.pipeline < 0.999,
        optimizer_fraction=holds.optimizer_state,
        host=costs.step_state(cell).host if recipe.cpu_offload else None,
        workers_per_server=len(layout.training_ranks) / servers if servers else 1.0,
    )
    traced = replace(profile, units=computed(profile, strategy, recipe).units)
    return Step.of_columns([column], traced, recipe, node, constants, fp8=fp8)


def layout_column(
    costs: Costs[Any],
    cell: Cell,
    layout: Layout,
    node: NodeType,
    constants: Constants,
    *,
    profile: Profile,
    gathers_again: bool,
    optimizer_fraction: float,
    host: HostState | None,
    workers_per_server: float = 1.0,
) -> Column:
    """Return the numbers of one layout; of `layout` only its sizes are read.

    Raises `InputError` for a link or network that the node's file does not describe.
    """
    size, passes = cell.size, cell.recipe.gradient_accumulation
    per_node = max(1, cell.world_size // cell.nodes)
    microbatches = costs.num_microbatches(cell)
    traffic = costs.library_traffic(cell)
    parts = layout.tensor * layout.pipeline
    gradient_bytes = cell.weight_bytes * max(1, size.trained_parameters) / parts
    reduced = [
        part.payload_bytes / gradient_bytes
        for part in traffic
        if part.kind in REDUCTIONS and not part.waited_for
    ]
    ranks_per_node = per_node
    if cell.nodes == 1:  # groups may include parameter servers
        ranks_per_node = max((per_node, *(part.ranks * part.rank_stride for part in traffic)))
    sent, copied = [0.0] * STREAMS, [0.0] * STREAMS
    for part in traffic:
        waited = 3 if part.filling else 2
        stream = waited if part.waited_for else int(part.kind in REDUCTIONS)
        sent[stream] += workers_per_server * collective_seconds(
            part, ranks_per_node, node, constants
        )
        copied[stream] += node.slowdown(per_node) * copy_seconds(
            part.copied_bytes, node.card, constants
        )
    moved_bytes = (
        (0.0,) * STREAMS if host is None else (host.fetched, host.handed_back, host.returned, 0.0)
    )
    # A fused update is one kernel, which reads all once and writes all but the gradient.
    accesses = 3 * cell.weight_bytes / FP32_BYTES + 2 * profile.state_values
    if host is not None and not host.fused_update:
        accesses = profile.update_accesses or accesses
    return Column(
        samples=cell.samples(layout.shares) / passes / microbatches,
        tensor=layout.tensor,
        sequence=layout.sequence,
        repeats=microbatches * size.stage_compute_imbalance / layout.pipeline,
        passes=passes,
        reducing_passes=min(passes, max(1, round(max(reduced, default=0.0)))),
        gathers_again=float(gathers_again),
        bubble=costs.bubble(cell),
        devices=layout.devices,
        slowdown=node.slowdown(per_node),
        update_seconds=update_seconds(
            accesses * optimizer_fraction * size.trained_parameters,
            node,
            constants,
            sharing=None if host is None else per_node,
        )
        + update_products_seconds(
            profile.update_products, optimizer_fraction, node.card, cell.recipe, constants
        ),
        library_operations=small_operations(costs.library_work(cell), updates=False),
        library_seconds=library_seconds(costs, cell, node.card),
        driven_devices=costs.driven_devices(cell),
        communication_seconds=sent,
        copy_seconds=copied,
        host_seconds=[host_seconds(count, node.card, constants) for count in moved_bytes],
    )


def _seconds_by_unit(operations_by_unit: Sequence[tuple[Operation, ...]], **others: Any) -> Array:
    """Seconds of one pass of each unit, shape (units, layouts); alike units are computed once."""
    seconds = {
        operations: operation_seconds(operations, **others) for operations in {*operations_by_unit}
    }
    return np.array([seconds[operations] for operations in operations_by_unit])


def _calls(operations: Iterable[Operation]) -> float:
    return sum(operation.calls for operation in operations)


def _fractions(counts: Sequence[int]) -> Array:
    """Return the counts divided by their sum, shape (counts, 1)."""
    return np.array(counts, dtype=np.float64)[:, None] / max(1, sum(counts))


def two_streams(
    computing: Sequence[Numbers], gathering: Sequence[Numbers], reducing: Sequence[Numbers]
) -> Numbers:
    """Seconds until a stream that computes and one that communicates have finished all tasks.

    Each stream does one thing at a time, in the order of requests.  Arguments have the seconds of
    each task in order: to compute, to gather what it needs, which is requested when the task before
    it begins, and to reduce what it leaves.  The first task waits for its own gather.
    """
    computed = np.zeros_like(computing[0])
    sent = ready = gathering[0]
    for seconds, ahead, reduced in zip(computing, (*gathering[1:], 0.0), reducing, strict=True):
        begun = np.maximum(computed, ready)
        fetched = np.maximum(sent, begun) + ahead
        ready = np.where(ahead > 0, fetched, 0.0)
        sent = np.where(ahead > 0, fetched, sent)
        computed = begun + seconds
        sent = np.where(reduced > 0, np.maximum(sent, computed) + reduced, sent)
    return np.maximum(computed, sent)


def distribution_tax(ranks: Numbers, passes: Numbers, constants: Constants) -> Numbers:
    """Extra computing time of several ranks over that of one: hooks, and waiting for the slowest.

    The largest of n normal draws lies sqrt(2 ln n) standard deviations above their mean for large
    n (David and Nagaraja, Order Statistics, 3rd ed., 2003, section 10.5); ranks wait for each other
    once in a step, and the mean of its passes spreads less by their square root.
    """
    slowest = constants.spread * np.sqrt(2 * np.log(ranks) / passes)
    return np.where(np.asarray(ranks) > 1, constants.distribution + slowest, 0.0)
