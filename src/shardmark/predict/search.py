"""Every way of dividing so many ranks, at once: which are fastest, and which need least memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmark.core.layout import Layout, Mesh
from shardmark.core.recipe import Recipe
from shardmark.core.traffic import ModelSize, Traffic
from shardmark.costs import cost_model
from shardmark.costs.base import FP32_BYTES, Cell, HostState, StepState
from shardmark.predict.hardware.catalogue import NodeType
from shardmark.predict.library import library_seconds
from shardmark.predict.memory import computed, fullest, needed_bytes
from shardmark.predict.profile import Profile
from shardmark.predict.step import STREAMS, Factors, stream_of
from shardmark.predict.timeline import distribution_tax
from shardmark.predict.timing import (
    Constants,
    collective_seconds,
    copy_seconds,
    host_seconds,
    interference,
    operation_seconds,
    update_seconds,
)
from shardmark.strategies import STRATEGIES
from shardmark.strategies.base import Strategy, samples_of_share

Array = NDArray[np.float64]
Division = tuple[bool, int, int]
"""Whether activations are computed again, tensor ranks, stages."""
GAIN = 0.9
"""A layout belongs to the front if it needs at most so much of the memory of every faster one."""
DIVIDED = "fsdp-tp-pp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way of dividing the ranks and their samples."""

    strategy: str
    options: Mapping[str, Any]
    mesh: Mesh
    activation_checkpointing: bool
    cpu_offload: bool
    gradient_accumulation: int
    micro_batch: int
    """Samples that a rank computes at once."""
    samples: int
    """Samples of a step, over all ranks."""
    step_seconds: float
    device_bytes: float

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What was found."""

    ranks: int
    nodes: int
    searched: int
    """Layouts."""
    seconds: float
    """That the search took, with the model traced already."""
    front: tuple[Candidate, ...]
    """Candidates that none beats in both samples per second and memory, the fastest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """Layouts side by side: each array has one number for each."""

    counts: Array
    """Micro-batches: of a pipeline, or of gradient accumulation where there are no stages."""
    samples: Array
    """Of a share's step."""
    tensor: Array
    """Ranks over which a layer is divided."""
    shards: Array
    stages: Array
    costliest: Array
    """What the fullest stage computes, over the mean one."""
    again: Array
    """1 where what was gathered is gathered again for the backward pass."""
    checkpointed: Array
    offloaded: Array
    casts: Array
    """1 where parameters are cast to the recipe's precision."""
    bubble: Array
    gathered: Array
    reduced: Array
    waited: Array
    passed_on: Array
    """Seconds between stages."""
    library: Array
    held: Array
    """Bytes of a rank's state, whatever it computes."""
    kept: Array
    """Share of each unit's gradients that it keeps at least, as they are computed."""

    @property
    def parts(self) -> Array:
        """Ranks that see the same samples."""
        return self.tensor * self.stages

    def step_samples(self, ranks: int) -> Array:
        """Samples of a step over all ranks: with a batch of each rank, they differ."""
        return self.samples * ranks / self.parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Searcher:
    """A model on so many ranks of machines of one kind."""

    profiles: Mapping[bool, Profile]
    """With and without activation checkpointing."""
    sizes: Mapping[Division, ModelSize]
    """Of divisions that the model allows."""
    recipe: Recipe
    node: NodeType
    ranks: int
    nodes: int
    constants: Constants
    factors: Factors

    def search(self, room_bytes: float) -> Search:
        """Compare all layouts whose memory fits into the room, by the samples that they train."""
        began = time.perf_counter()
        kinds, columns = self._columns()
        seconds, least = self._seconds(columns), self._least_bytes(columns)
        front: list[Candidate] = []
        best = room_bytes / GAIN
        for at in np.lexsort((least, seconds / columns.step_samples(self.ranks))):
            if least[at] > GAIN * best:
                continue
            candidate = self._candidate(kinds[at], columns, int(at), float(seconds[at]))
            if candidate.device_bytes <= GAIN * best:
                front.append(candidate)
                best = candidate.device_bytes
        return Search(
            ranks=self.ranks,
            nodes=self.nodes,
            searched=len(kinds),
            seconds=time.perf_counter() - began,
            front=tuple(front),
        )

    def layouts(self) -> Iterator[tuple[str, Mapping[str, Any], Recipe, float, float]]:
        """Strategy, options, recipe, seconds of a step, and bytes that it needs at least."""
        kinds, columns = self._columns()
        least = self._least_bytes(columns)
        for at, seconds in enumerate(self._seconds(columns)):
            name, options = self._named(kinds[at], int(columns.counts[at]))
            yield name, options, self._recipe(columns, at), float(seconds), float(least[at])

    def _columns(self) -> tuple[list[tuple[Mesh, bool]], _Columns]:
        kinds: list[tuple[Mesh, bool]] = []
        rows: list[tuple[float, ...]] = []
        recipes = {
            ((checkpointed, offloaded), passes): self.recipe.model_copy(
                update={
                    "activation_checkpointing": checkpointed,
                    "cpu_offload": offloaded,
                    "gradient_accumulation": passes,
                }
            )
            for checkpointed, offloaded, passes in product(self.profiles, (False, True), (1, 2))
        }
        for mesh in self._meshes():
            samples = self._samples(mesh)
            if not samples:
                continue
            staged = mesh.pipeline > 1
            counts = [m for m in _divisors(samples) if not staged or m >= mesh.pipeline]
            variants = product(_reshards(mesh), self.profiles, self._offloads(mesh))
            for again, checkpointed, offloaded in variants:
                division = (checkpointed, mesh.tensor, mesh.pipeline)
                if division not in self.sizes:
                    continue
                strategy = self._strategy(mesh, again, 1)
                both = [recipes[(checkpointed, offloaded), passes] for passes in (1, 2)]
                casts = strategy.numerics(both[0]).casts is not None
                bubble = cost_model(strategy).bubble(self._cell(both[0]))
                sent = self._sent((mesh, again), division, both, counts)
                library = self._library((mesh, again), division, both, counts)
                held = [self._held(strategy, recipe) for recipe in both]
                costliest = self.sizes[division].stage_compute_imbalance
                for count, seconds, own in zip(counts, sent, library, strict=True):
                    kinds.append((mesh, again))
                    shape = (count, samples, mesh.tensor, mesh.shard, mesh.pipeline)
                    state = held[count > 1 and not staged]
                    told = (costliest, again, checkpointed, offloaded, casts, bubble / count)
                    rows.append((*shape, *told, *seconds, own, *state))
        columns = np.array(rows, dtype=np.float64).reshape(len(rows), len(_Columns.__slots__)).T
        return kinds, _Columns(**dict(zip(_Columns.__slots__, columns, strict=True)))

    def _meshes(self) -> Iterator[Mesh]:
        for tensor, pipeline in dict.fromkeys((t, p) for _, t, p in self.sizes):
            rest, left = divmod(self.ranks, tensor * pipeline)
            for shard in () if left else _divisors(rest):
                yield Mesh(data=rest // shard, shard=shard, tensor=tensor, pipeline=pipeline)

    def _offloads(self, mesh: Mesh) -> tuple[bool, ...]:
        """Shards alone, where the way to the host is known."""
        known = self.node.card.host_bytes_per_second is not None
        return (False, True) if known and mesh.shard > 1 and mesh.ranks_per_share == 1 else (False,)

    def _samples(self, mesh: Mesh) -> int:
        """Of a share; 0 where they cannot be shared out."""
        shares, whole = mesh.data * mesh.shard, self.recipe.global_batch
        return 0 if whole is not None and whole % shares else samples_of_share(self.recipe, shares)

    def _strategy(self, mesh: Mesh, again: bool, count: int) -> Strategy:
        name, options = self._named((mesh, again), count)
        return STRATEGIES[name](**options)

    def _named(self, kind: tuple[Mesh, bool], count: int) -> tuple[str, dict[str, Any]]:
        """The strategy that lays ranks out so, and its options."""
        mesh, again = kind
        if mesh.ranks_per_share > 1:
            options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": again}
            return DIVIDED, options | ({"micro_batches": count} if mesh.pipeline > 1 else {})
        if mesh.shard == 1:
            return ("ddp" if mesh.ranks > 1 else "single"), {}
        if mesh.data == 1:
            return ("fsdp" if again else "fsdp-grad-op"), {}
        return "fsdp-hybrid", {"shard_group": mesh.shard, "reshard_after_forward": again}

    def _sent(
        self,
        kind: tuple[Mesh, bool],
        division: Division,
        recipes: Sequence[Recipe],
        counts: list[int],
    ) -> Iterator[tuple[float, ...]]:
        """Seconds by stream.

        All that is sent lies on a line in micro-batches, of which the recipes have one and two.
        """
        staged = kind[0].pipeline > 1
        once, twice = (
            cost_model(self._strategy(*kind, count if staged else 1))
            .required_traffic(
                self._cell(recipes[0 if staged else count - 1], size=self.sizes[division])
            )
            .traffic
            for count in (1, 2)
        )
        per_node = max(1, self.ranks // self.nodes)

        @cache
        def seconds(slot: int, payload_bytes: float, calls: float) -> float:
            traffic: Traffic = replace(once[slot], payload_bytes=payload_bytes, calls=calls)
            found = collective_seconds(traffic, per_node, self.node, self.constants)
            return self.factors.communication * found

        compute = self.factors.compute * self.node.slowdown(per_node)
        hosts = self._hosts(kind, recipes)
        for count in counts:
            sums = [0.0] * STREAMS
            if hosts is not None:
                fetched = hosts[0].fetched + (count - 1) * (hosts[1].fetched - hosts[0].fetched)
                for stream, moved in enumerate((fetched, hosts[0].handed_back, hosts[0].returned)):
                    sums[stream] += host_seconds(moved, self.node.card, self.constants)
            for slot, (first, second) in enumerate(zip(once, twice, strict=True)):
                more = (count - 1) * (second.payload_bytes - first.payload_bytes)
                calls = first.calls + (count - 1) * (second.calls - first.calls)
                copied = first.copied_bytes + (count - 1) * (
                    second.copied_bytes - first.copied_bytes
                )
                copying = compute * copy_seconds(copied, self.node.card, self.constants)
                sums[stream_of(first)] += copying + seconds(slot, first.payload_bytes + more, calls)
            yield tuple(sums)

    def _library(
        self,
        kind: tuple[Mesh, bool],
        division: Division,
        recipes: Sequence[Recipe],
        counts: list[int],
    ) -> Iterator[float]:
        """Seconds of the libraries' own code, which lie on a line in micro-batches, too."""
        staged = kind[0].pipeline > 1
        once, twice = (
            library_seconds(
                cost_model(self._strategy(*kind, count if staged else 1)),
                self._cell(recipes[0 if staged else count - 1], size=self.sizes[division]),
                self.node.card,
            )
            for count in (1, 2)
        )
        slowdown = self.node.slowdown(max(1, self.ranks // self.nodes))
        for count in counts:
            yield slowdown * (once + (count - 1) * (twice - once))

    def _hosts(
        self, kind: tuple[Mesh, bool], recipes: Sequence[Recipe]
    ) -> tuple[HostState, HostState] | None:
        units = next(iter(self.profiles.values())).units
        costs = cost_model(self._strategy(*kind, 1))
        once, twice = (costs.step_state(self._cell(recipe, units=units)).host for recipe in recipes)
        return None if once is None or twice is None else (once, twice)

    def _seconds(self, of: _Columns) -> Array:
        """As `Step.time` has them, of all layouts at once."""
        staged = of.stages > 1
        passes = np.where(staged, 1, of.counts)
        pieces = np.where(staged, of.counts, 1)
        samples = of.samples / of.counts
        compute = self.factors.compute * self.node.slowdown(max(1, self.ranks // self.nodes))
        scale = compute * pieces * of.costliest / of.stages
        forward, backward = (table * scale for table in self._computing(of, samples))
        profile = next(iter(self.profiles.values()))
        held, trained = (
            np.array(values, dtype=np.float64)[:, None] / max(1, sum(values))
            for values in (
                [unit.parameters for unit in profile.units],
                [unit.trained_parameters for unit in profile.units],
            )
        )
        again = of.again > 0
        gathers = held * (of.gathered / (passes * np.where(again, 2, 1)))
        nothing = np.zeros_like(gathers)
        computing = [*forward, *backward[::-1]]
        gathering = [*gathers, *np.where(again, gathers[::-1], 0.0)]
        reducing = trained[::-1] * of.reduced
        last = _two_streams(computing, gathering, [*nothing, *reducing])
        quiet = _two_streams(computing, gathering, [*nothing, *nothing])
        spans = last + (passes - 1) * quiet
        alone = passes * sum(computing)
        shown = spans - alone
        updated = profile.size.trained_parameters / (of.parts * of.shards)
        per_node = max(1, self.ranks // self.nodes)
        on_card, on_host = (
            update_seconds(
                1.0, self.recipe.optimizer.name, self.node, self.constants, sharing=sharing
            )
            for sharing in (None, per_node)
        )
        whole = alone + compute * updated * np.where(of.offloaded > 0, on_host, on_card)
        taxes = {n: distribution_tax(self.ranks, int(n), self.constants) for n in np.unique(passes)}
        tax = np.array([taxes[n] for n in passes])
        hidden = np.maximum(0.0, of.gathered + of.reduced - shown)
        taken = interference(self.node, self.constants) * hidden
        between = np.maximum(of.bubble * of.passed_on, of.passed_on - alone)
        waited = shown + of.waited + between
        seconds: Array = whole * (1 + tax) + alone * of.bubble + waited + taken + of.library
        return seconds

    def _computing(self, of: _Columns, samples: Array) -> tuple[Array, Array]:
        """Of each unit (rows) and layout, on one stage; what is alike once."""
        keys = np.stack([of.checkpointed, samples, of.tensor])
        distinct, where = np.unique(keys, axis=1, return_inverse=True)
        tables: tuple[list[list[float]], list[list[float]]] = ([], [])
        for checkpointed, count, tensor in distinct.T:
            units = self.profiles[bool(checkpointed)].units
            forward, backward = (
                [
                    operation_seconds(
                        operations,
                        count,
                        self.node.card,
                        self.recipe,
                        self.constants,
                        tensor=int(tensor),
                    )
                    for operations in of_units
                ]
                for of_units in ([u.forward for u in units], [u.backward for u in units])
            )
            if checkpointed:
                backward = [a + b for a, b in zip(forward, backward, strict=True)]
            tables[0].append(forward)
            tables[1].append(backward)
        forward_of, backward_of = (np.array(table).T[:, where.ravel()] for table in tables)
        return forward_of, backward_of

    def _state(self, strategy: Strategy, profile: Profile, recipe: Recipe) -> StepState:
        cell = self._cell(recipe, units=profile.units, device_type=self.node.card.device_type)
        return cost_model(strategy).step_state(cell)

    def _cell(self, recipe: Recipe, **fields: Any) -> Cell:
        """Return the argument of the cost functions on the search's ranks."""
        return Cell(recipe=recipe, world_size=self.ranks, nodes=self.nodes, **fields)

    def _held(self, strategy: Strategy, recipe: Recipe) -> tuple[float, float]:
        profile = computed(self.profiles[recipe.activation_checkpointing], strategy, recipe)
        state = self._state(strategy, profile, recipe)
        values = state.optimizer_share * profile.state_values * profile.size.trained_parameters
        if state.host is not None:
            values = 0.0
        held = state.parameters + state.gradients + state.optimizer_state + state.buffers
        whole = [FP32_BYTES * unit.trained_parameters for unit in profile.units]
        kept = [
            each.retained_gradients / most
            for each, most in zip(state.units, whole, strict=True)
            if most
        ]
        held += FP32_BYTES * values + profile.buffer_bytes + profile.data_bytes
        return held, min(kept, default=0.0)  # below 0 where a copy is let go of

    def _least_bytes(self, of: _Columns) -> Array:
        """Device memory that a layout needs at least, as `rank_memory` has it.

        Messages, and units that are gathered for their computation, come on top.
        """
        staged = of.stages > 1
        inflight = np.where(staged, np.minimum(1.0, of.stages / of.counts), 1 / of.counts)
        samples = of.samples * inflight
        stays = (of.shards > 1) & (of.again == 0) & (of.parts == 1)
        peak = np.zeros_like(samples)
        for checkpointed, casts, profile in self._computed():
            gathered = np.where(stays, 2 * profile.size.parameters, 0.0)
            fullest = of.kept * FP32_BYTES * profile.size.trained_parameters
            gradients = np.zeros_like(samples)
            for unit in reversed(profile.units):
                for moment in unit.backward_moments:
                    live = moment.bytes.fixed + moment.bytes.per_sample * samples
                    whole = moment.bytes.replicated_fraction
                    live *= whole + (1 - whole) / of.tensor
                    np.maximum(fullest, live / of.stages + gradients + gathered, out=fullest)
                gathered = np.zeros_like(samples)
                gradients = gradients + of.kept * FP32_BYTES * unit.trained_parameters
            batch = profile.batch_bytes.fixed + profile.batch_bytes.per_sample * samples
            fullest += np.where(staged, 0.0, (of.counts - 1) * batch)
            chosen = (of.checkpointed == checkpointed) & (of.casts == casts)
            peak = np.where(chosen, fullest, peak)
        return needed_bytes(of.held + peak, self.node.card.device_type)

    def _computed(self) -> Iterator[tuple[bool, bool, Profile]]:
        """Whether activations are computed again, whether parameters are cast, and the profile."""
        for checkpointed, profile in self.profiles.items():
            yield checkpointed, False, profile
            yield checkpointed, True, profile.native or profile

    def _recipe(self, of: _Columns, at: int) -> Recipe:
        staged = of.stages[at] > 1
        return self.recipe.model_copy(
            update={
                "activation_checkpointing": bool(of.checkpointed[at]),
                "cpu_offload": bool(of.offloaded[at]),
                "gradient_accumulation": 1 if staged else int(of.counts[at]),
            }
        )

    def _candidate(
        self, kind: tuple[Mesh, bool], of: _Columns, at: int, seconds: float
    ) -> Candidate:
        """With its memory: sizes alone, since thousands of ranks take long to be placed."""
        mesh, count = kind[0], int(of.counts[at])
        recipe = self._recipe(of, at)
        share = {"global_batch": None, "per_rank_batch": int(of.samples[at])}
        checkpointed = recipe.activation_checkpointing
        strategy = self._strategy(mesh, kind[1], count)
        profile = computed(self.profiles[checkpointed], strategy, recipe)
        state = self._state(strategy, profile, recipe)
        sizes = Layout(ranks=(), **mesh.model_dump())
        size = self.sizes[checkpointed, mesh.tensor, mesh.pipeline]
        memory = fullest(
            replace(profile, size=size),
            sizes,
            state,
            recipe.model_copy(update=share),
            in_flight=cost_model(strategy).in_flight(self._cell(recipe)),
        )
        name, options = self._named(kind, count)
        return Candidate(
            strategy=name,
            options=options,
            mesh=mesh,
            activation_checkpointing=checkpointed,
            cpu_offload=recipe.cpu_offload,
            gradient_accumulation=recipe.gradient_accumulation,
            micro_batch=int(of.samples[at]) // count,
            samples=int(of.samples[at]) * mesh.data * mesh.shard,
            step_seconds=seconds,
            device_bytes=memory.device_bytes(self.node.card.device_type),
        )


def _reshards(mesh: Mesh) -> tuple[bool, ...]:
    """Whether gathered parameters may be freed: only where there are shards, and no stages."""
    return (True, False) if mesh.shard > 1 and mesh.pipeline == 1 else (False,)


@cache
def _divisors(number: int) -> list[int]:
    small = [each for each in range(1, isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def _two_streams(computing: list[Array], gathering: list[Array], reducing: list[Array]) -> Array:
    """`timeline.two_streams` of many layouts."""
    computed = np.zeros_like(computing[0])
    sent = ready = gathering[0]
    following = [*gathering[1:], np.zeros_like(computed)]
    for seconds, ahead, reduced in zip(computing, following, reducing, strict=True):
        begun = np.maximum(computed, ready)
        fetched = np.maximum(sent, begun) + ahead
        ready = np.where(ahead > 0, fetched, 0.0)
        sent = np.where(ahead > 0, fetched, sent)
        computed = begun + seconds
        sent = np.where(reduced > 0, np.maximum(sent, computed) + reduced, sent)
    return np.maximum(computed, sent)
