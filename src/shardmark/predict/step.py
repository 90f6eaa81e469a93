"""Predicts the time of a step: a model's profile under a strategy, on so many nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardmark.core.recipe import Recipe
from shardmark.core.traffic import Traffic
from shardmark.costs import cost_model
from shardmark.costs.base import FP32_BYTES, Cell, HostState
from shardmark.predict.hardware.catalogue import NodeType
from shardmark.predict.library import library_seconds
from shardmark.predict.profile import Profile
from shardmark.predict.timeline import distribution_tax, two_streams
from shardmark.predict.timing import (
    Constants,
    collective_seconds,
    copy_seconds,
    host_seconds,
    interference,
    operation_seconds,
    update_seconds,
)
from shardmark.strategies.base import Strategy, samples_of_share

STREAMS = 4
REDUCING = ("all_reduce", "reduce_scatter", "reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """What measurements said of a machine: measured seconds over predicted ones."""

    compute: float = 1.0
    communication: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step by what they are spent on."""

    compute_seconds: float
    """Forward, backward and update, alone on its card."""
    distribution_seconds: float
    """That computing takes longer because there are several ranks."""
    bubble_seconds: float
    """That a rank waits for its pipeline to fill and drain."""
    waiting_seconds: float
    """For communication that nothing hides."""
    interference_seconds: float
    """Of communication that computing hides, and which slows it down."""
    library_seconds: float = 0.0
    """Of the loop's and the library's own code, where a processor computes."""

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
        """What takes most of it."""
        communication = self.waiting_seconds + self.interference_seconds
        parts = {
            "computing": self.compute_seconds + self.distribution_seconds,
            "communication": communication,
            "the pipeline's bubble": self.bubble_seconds,
            "the library's own code": self.library_seconds,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step of every rank: what it computes and sends, before anything is measured."""

    forward_seconds: tuple[float, ...]
    """Of each unit in a pass, alone on its card."""
    backward_seconds: tuple[float, ...]
    update_seconds: float
    held: tuple[float, ...]
    """Each unit's share of the parameters, by which it shares in what is gathered."""
    trained: tuple[float, ...]
    passes: int
    gathers_again: bool
    """For the backward pass, what was freed after the forward pass."""
    reducing_passes: int
    """In which gradients are shared: the last alone, unless the strategy shares them more often."""
    bubble: float
    devices: int
    node: NodeType
    ranks_per_node: int
    traffic: tuple[Traffic, ...]
    workers_per_server: float
    """Whose messages one link has to carry."""
    slowdown: float
    """Of computing, by ranks that share its cores."""
    library_seconds: float
    host: HostState | None = None
    """What is offloaded."""

    def time(self, constants: Constants, factors: Factors = Factors()) -> StepTime:
        """Raises `InputError` where nothing is known of links or network."""
        compute, passes = factors.compute, self.passes
        forward = [compute * seconds for seconds in self.forward_seconds]
        backward = [compute * seconds for seconds in reversed(self.backward_seconds)]
        gathered, reduced, waited, passed_on = (
            factors.communication * sent + compute * copied + moved
            for sent, copied, moved in zip(
                self._communication(constants),
                self._copying(constants),
                self._offloading(constants),
                strict=True,
            )
        )
        once = gathered / (passes * (2 if self.gathers_again else 1))
        gathers = [once * share for share in self.held]
        reduces = [reduced / self.reducing_passes * share for share in reversed(self.trained)]
        nothing = [0.0] * len(forward)
        again = gathers[::-1] if self.gathers_again else nothing

        def span(reducing: list[float]) -> float:
            return two_streams(forward + backward, gathers + again, nothing + reducing)

        quiet = passes - self.reducing_passes
        spans = self.reducing_passes * span(reduces) + (quiet * span(nothing) if quiet else 0.0)
        computing = passes * (sum(forward) + sum(backward))
        shown = spans - computing
        alone = computing + compute * self.update_seconds
        waited += max(self.bubble * passed_on, passed_on - computing)
        return StepTime(
            compute_seconds=alone,
            distribution_seconds=alone * distribution_tax(self.devices, passes, constants),
            bubble_seconds=computing * self.bubble,
            waiting_seconds=shown + waited,
            interference_seconds=interference(self.node, constants)
            * max(0.0, gathered + reduced - shown),
            library_seconds=self.library_seconds,
        )

    def _offloading(self, constants: Constants) -> tuple[float, ...]:
        """The same of what moves between card and host."""
        host = self.host
        if host is None:
            return (0.0,) * STREAMS
        return tuple(
            host_seconds(moved, self.node.card, constants)
            for moved in (host.fetched, host.handed_back, host.returned, 0.0)
        )

    def _communication(self, constants: Constants) -> tuple[float, ...]:
        """Seconds by stream."""
        return self._by_stream(
            self.workers_per_server
            * collective_seconds(each, self.ranks_per_node, self.node, constants)
            for each in self.traffic
        )

    def _copying(self, constants: Constants) -> tuple[float, ...]:
        """The same of what is copied into messages and out of them."""
        return self._by_stream(
            self.slowdown * copy_seconds(each.copied_bytes, self.node.card, constants)
            for each in self.traffic
        )

    def _by_stream(self, seconds: Iterable[float]) -> tuple[float, ...]:
        sums = [0.0] * STREAMS
        for each, spent in zip(self.traffic, seconds, strict=True):
            sums[stream_of(each)] += spent
        return tuple(sums)


def stream_of(traffic: Traffic) -> int:
    """0 where it is gathered ahead, 1 for gradients, 2 where it is waited for, 3 between stages."""
    if traffic.waited_for:
        return 3 if traffic.filling else 2
    return int(traffic.kind in REDUCING)


def plan_step(
    profile: Profile,
    strategy: Strategy,
    recipe: Recipe,
    world_size: int,
    node: NodeType,
    *,
    nodes: int = 1,
    constants: Constants,
) -> Step:
    """What a strategy's layout and traffic make of the profile.

    Raises `InputError` for a precision that the card has not in hardware, and for a strategy
    without a cost model.
    """
    layout = strategy.layout(world_size, nodes)
    passes = recipe.gradient_accumulation
    samples = samples_of_share(recipe, layout.shares) / passes
    parts = layout.tensor * layout.pipeline
    stages = layout.pipeline / profile.size.stage_compute_imbalance  # which the others wait for
    per_node = max(1, world_size // nodes)
    slowdown = node.slowdown(per_node)
    costs = cost_model(strategy)
    cell = Cell(
        size=profile.size, units=profile.units, recipe=recipe, world_size=world_size, nodes=nodes
    )
    num_microbatches = costs.num_microbatches(cell)
    forward, backward = (
        [
            slowdown
            * num_microbatches
            * operation_seconds(
                operations,
                samples / num_microbatches,
                node.card,
                recipe,
                constants,
                tensor=layout.tensor,
                sequence=layout.sequence,
            )
            / stages
            for operations in of_units
        ]
        for of_units in (
            [unit.forward for unit in profile.units],
            [unit.backward for unit in profile.units],
        )
    )
    if recipe.activation_checkpointing:
        backward = [first + second for first, second in zip(forward, backward, strict=True)]
    traffic = costs.library_traffic(cell)
    gradient_bytes = FP32_BYTES * max(1, profile.size.trained_parameters) / parts
    reduced = [
        each.payload_bytes / gradient_bytes
        for each in traffic
        if each.kind in REDUCING and not each.waited_for
    ]
    ranks_of_one = max(
        (each.ranks * each.rank_stride for each in traffic), default=1
    )  # servers, too
    kept = layout.ranks[0].holds
    servers = len(layout.server_ranks)
    host = None
    if recipe.cpu_offload:
        host = costs.step_state(cell).host
    updating = update_seconds(
        kept.optimizer_state * profile.size.trained_parameters,
        recipe.optimizer.name,
        node,
        constants,
        sharing=None if host is None else per_node,
    )
    return Step(
        host=host,
        forward_seconds=tuple(forward),
        backward_seconds=tuple(backward),
        update_seconds=slowdown * updating,
        held=_shares([unit.parameters for unit in profile.units]),
        trained=_shares([unit.trained_parameters for unit in profile.units]),
        passes=passes,
        gathers_again=kept.parameters * parts < 0.999,
        reducing_passes=min(passes, max(1, round(max(reduced, default=0.0)))),
        bubble=costs.bubble(cell),
        devices=layout.devices,
        node=node,
        ranks_per_node=per_node if nodes > 1 else max(ranks_of_one, per_node),
        traffic=traffic,
        slowdown=slowdown,
        library_seconds=slowdown * library_seconds(costs, cell, node.card),
        workers_per_server=len(layout.training_ranks) / servers if servers else 1.0,
    )


def _shares(parameters: list[int]) -> tuple[float, ...]:
    whole = max(1, sum(parameters))
    return tuple(each / whole for each in parameters)
