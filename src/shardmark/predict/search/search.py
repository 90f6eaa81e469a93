"""Compares every layout of a number of ranks: the fastest, and those that need less memory."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import isqrt
from typing import Any

from shardmark.base.errors import StrategyUnavailable
from shardmark.base.layout import Layout, Mesh
from shardmark.base.machine import Machine
from shardmark.base.recipe import Recipe
from shardmark.base.traffic import ModelSize
from shardmark.experiment.experiment import Experiment
from shardmark.predict.hardware.catalogue import NodeType
from shardmark.predict.memory import (
    MemoryColumn,
    computes_natively,
    largest_moments,
    memory_column,
    needed_bytes,
    peak_bytes,
)
from shardmark.predict.model_name import CASTS
from shardmark.predict.models import Models, without_flash
from shardmark.predict.profile import Profile
from shardmark.predict.step import Column, Factors, Step, layout_column
from shardmark.predict.timing import Constants
from shardmark.ranks.costs import cost_model
from shardmark.ranks.costs.base import Cell, StepState
from shardmark.ranks.strategies import STRATEGIES
from shardmark.ranks.strategies.base import samples_of_share
from shardmark.ranks.trial import StrategySpec, Trial

Division = tuple[bool, int, int]
"""Activation checkpointing, number of tensor-parallel ranks, number of pipeline stages."""
GAIN = 0.9
"""A layout is on the front if it needs at most this fraction of the memory of every faster one."""
LAYERED = "fsdp-tp-pp"
"""Strategy of the layouts that divide layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout of the ranks, with its prediction."""

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
    """Result of a search."""

    ranks: int
    nodes: int
    searched: int
    """Number of layouts that were compared."""
    seconds: float
    """Time of the search, without tracing the model."""
    front: tuple[Candidate, ...]
    """Candidates that no other beats in both samples per second and memory, the fastest first."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """A layout before its prediction."""

    mesh: Mesh
    reshards: bool
    """True if gathered parameters are freed after the forward pass."""
    checkpointed: bool
    offloaded: bool
    micro_batches: int
    """Micro-batches of a pipeline, or of gradient accumulation if there are no stages."""
    samples: int
    """Samples of a step for each share of the batch."""
    casting: str | None

    @property
    def passes(self) -> int:
        return 1 if self.mesh.pipeline > 1 else self.micro_batches

    @property
    def strategy(self) -> tuple[str, dict[str, Any]]:
        """Name and options of the strategy that has this layout."""
        mesh = self.mesh
        if mesh.ranks_per_share > 1:
            options = {"mesh": mesh, "reshard_after_forward": self.reshards}
            staged = mesh.pipeline > 1
            return LAYERED, options | ({"micro_batches": self.micro_batches} if staged else {})
        if mesh.shard == 1:
            return ("ddp" if mesh.ranks > 1 else "single"), {}
        casting = {CASTS: self.casting} if self.casting else {}
        if mesh.data == 1:
            return ("fsdp" if self.reshards else "fsdp-grad-op"), casting
        options = {"shard_group": mesh.shard, "reshard_after_forward": self.reshards}
        return "fsdp-hybrid", options | casting


@dataclass(frozen=True, slots=True, kw_only=True)
class Searcher:
    """A model on a number of ranks of machines of one kind."""

    profiles: Mapping[bool, Profile]
    """Profiles with and without activation checkpointing."""
    sizes: Mapping[Division, ModelSize]
    """Sizes of the model under the divisions that it allows."""
    recipe: Recipe
    node: NodeType
    ranks: int
    nodes: int
    constants: Constants
    factors: Factors
    casting: str | None = None

    def search(self, room_bytes: float) -> Search:
        """Compare all layouts whose memory is at most `room_bytes`, by samples per second."""
        began = time.perf_counter()
        candidates = self.candidates()
        front: list[Candidate] = []
        most_bytes = room_bytes
        for candidate in sorted(
            candidates, key=lambda one: (one.step_seconds / one.samples, one.device_bytes)
        ):
            if candidate.device_bytes <= most_bytes:
                front.append(candidate)
                most_bytes = GAIN * candidate.device_bytes
        return Search(
            ranks=self.ranks,
            nodes=self.nodes,
            searched=len(candidates),
            seconds=time.perf_counter() - began,
            front=tuple(front),
        )

    def candidates(self) -> list[Candidate]:
        """Predict all layouts."""
        groups: dict[tuple[bool, bool], list[tuple[_Choice, Column, MemoryColumn]]]
        groups = defaultdict(list)
        states: dict[_Choice, StepState] = {}
        for choice in self._choices():
            casts, column, memory = self._columns(choice, states)
            groups[choice.checkpointed, casts].append((choice, column, memory))
        candidates: list[Candidate] = []
        for (checkpointed, casts), rows in groups.items():
            choices, columns, memories = zip(*rows, strict=True)
            profile, recipe = self.profiles[checkpointed], self._recipe(choices[0])
            native = (profile.native if casts else None) or profile
            traced = replace(profile, units=native.units)
            step = Step.of_columns(columns, traced, recipe, self.node, self.constants)
            seconds = step.seconds(self.constants, self.factors.compute, self.factors.communication)
            peaks = peak_bytes(largest_moments(native, memories))
            for choice, step_seconds, peak in zip(choices, seconds, peaks, strict=True):
                name, options = choice.strategy
                mesh = choice.mesh
                candidates.append(
                    Candidate(
                        strategy=name,
                        options=options,
                        mesh=mesh,
                        activation_checkpointing=checkpointed,
                        cpu_offload=choice.offloaded,
                        gradient_accumulation=choice.passes,
                        micro_batch=choice.samples // choice.micro_batches,
                        samples=choice.samples * mesh.data * mesh.shard,
                        step_seconds=float(step_seconds),
                        device_bytes=float(needed_bytes(peak, self.node.card.device_type)),
                    )
                )
        return candidates

    def _choices(self) -> Iterator[_Choice]:
        for mesh in self._meshes():
            shares, batch = mesh.data * mesh.shard, self.recipe.global_batch
            if batch is not None and batch % shares:
                continue
            samples = samples_of_share(self.recipe, shares)
            # Gathered parameters may be freed only if there are shards, and no pipeline stages.
            frees = mesh.shard > 1 and mesh.pipeline == 1
            reshards_or_not = (True, False) if frees else (False,)
            for reshards, again, offloaded, count in product(
                reshards_or_not, self.profiles, self._offloads(mesh), _divisors(samples)
            ):
                has_size = (again, mesh.tensor, mesh.pipeline) in self.sizes
                if has_size and (mesh.pipeline == 1 or count >= mesh.pipeline):
                    yield _Choice(mesh, reshards, again, offloaded, count, samples, self.casting)

    def _meshes(self) -> Iterator[Mesh]:
        for tensor, pipeline in dict.fromkeys((t, p) for _, t, p in self.sizes):
            rest, left = divmod(self.ranks, tensor * pipeline)
            for shard in () if left else _divisors(rest):
                yield Mesh(data=rest // shard, shard=shard, tensor=tensor, pipeline=pipeline)

    def _offloads(self, mesh: Mesh) -> tuple[bool, ...]:
        """Offload is tried with shards alone, if the bandwidth to the host is known."""
        if self.node.card.host_bytes_per_second is None:
            return (False,)
        return (False, True) if mesh.shard > 1 and mesh.ranks_per_share == 1 else (False,)

    def _recipe(self, choice: _Choice) -> Recipe:
        return self.recipe.model_copy(
            update={
                "activation_checkpointing": choice.checkpointed,
                "cpu_offload": choice.offloaded,
                "gradient_accumulation": choice.passes,
            }
        )

    def _columns(
        self, choice: _Choice, states: dict[_Choice, StepState]
    ) -> tuple[bool, Column, MemoryColumn]:
        """Return whether the strategy casts parameters, and the numbers of both models.

        `states` has those of earlier layouts.  Without offload, a state does not depend on the
        number of micro-batches, except that one accumulates no gradients.
        """
        mesh, (name, options) = choice.mesh, choice.strategy
        strategy, recipe = STRATEGIES[name](**options), self._recipe(choice)
        costs = cost_model(strategy)
        cell = Cell(
            size=self.sizes[choice.checkpointed, mesh.tensor, mesh.pipeline],
            units=self.profiles[choice.checkpointed].units,
            recipe=recipe,
            world_size=self.ranks,
            nodes=self.nodes,
            device_type=self.node.card.device_type,
        )
        count = choice.micro_batches if choice.offloaded else min(2, choice.micro_batches)
        like = replace(choice, micro_batches=count)
        if (state := states.get(like)) is None:
            state = states[like] = costs.step_state(cell)
        layout = Layout(ranks=(), **dict(mesh))  # sizes alone: placing many ranks takes long
        column = layout_column(
            costs,
            cell,
            layout,
            self.node,
            self.constants,
            profile=self.profiles[choice.checkpointed],
            gathers_again=choice.reshards,
            optimizer_fraction=1 / (mesh.ranks_per_share * mesh.shard),
            host=state.host,
        )
        memory = memory_column(cell, layout, state, costs.in_flight(cell))
        return computes_natively(strategy, recipe), column, memory


@cache
def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


MOST_STAGES = 64
CHECKPOINTING = (False, True)


def searcher_of(
    cells: Sequence[Trial],
    node: NodeType,
    nodes: int,
    models: Models,
    *,
    constants: Constants,
    factors: Factors,
) -> Searcher:
    """Return a search over layouts of the first cell's model and recipe, cast as in any cell."""
    cell = max(cells, key=lambda one: CASTS in one.strategy.options)
    recipe = cell.recipe.model_copy(update={"gradient_accumulation": 1, "cpu_offload": False})
    recipes = {
        checkpointed: recipe.model_copy(update={"activation_checkpointing": checkpointed})
        for checkpointed in CHECKPOINTING
    }
    profiles = {
        checkpointed: models.profile(cell.workload, changed, device_type=node.card.device_type)
        for checkpointed, changed in recipes.items()
    }

    @cache
    def inside(again: bool, tensor: int) -> Mapping[str, Any]:
        return models.activation_traffic(_divided(cell, recipes[again], tensor, 1), tensor, 1)

    @cache
    def between(pipeline: int) -> Mapping[str, Any]:
        return models.activation_traffic(_divided(cell, recipe, 1, pipeline), pipeline, 1)

    sizes: dict[Division, ModelSize] = {}
    divisions = [*_divisions(cell, recipe, node, nodes, models)]
    least = min((tensor for tensor, _ in divisions if tensor > 1), default=1)
    for (tensor, pipeline), again in product(divisions, recipes):
        # What passes inside of layers is the same for any number of ranks.
        traffic = {
            **(inside(again, least) if tensor > 1 else {}),
            **(between(pipeline) if pipeline > 1 else {}),
        }
        sizes[again, tensor, pipeline] = replace(profiles[again].size, **traffic)
    return Searcher(
        profiles=profiles,
        sizes=sizes,
        recipe=recipe,
        node=node,
        ranks=node.node.devices * nodes,
        nodes=nodes,
        constants=constants,
        factors=factors,
        casting=cell.strategy.options.get(CASTS),
    )


def _divisions(
    cell: Trial, recipe: Recipe, node: NodeType, nodes: int, models: Models
) -> Iterator[tuple[int, int]]:
    """Yield the numbers of tensor ranks (within a node) and of stages that the model allows."""
    devices = node.node.devices
    ranks = devices * nodes
    machine = Machine.predicted("cuda", ranks)
    for tensor in (size for size in range(1, devices + 1) if devices % size == 0):
        for pipeline in (size for size in range(1, MOST_STAGES + 1) if ranks % size == 0):
            parts = tensor * pipeline
            if ranks % parts:
                continue
            with suppress(StrategyUnavailable):
                if parts > 1:
                    divided = _divided(cell, recipe, tensor, pipeline)
                    strategy = divided.built_strategy
                    strategy.check(parts, machine, divided.recipe)
                    models.check(divided, parts, 1)
                yield tensor, pipeline


def _divided(cell: Trial, recipe: Recipe, tensor: int, pipeline: int) -> Trial:
    """Return the cell with its layers divided, and with samples for each stage."""
    mesh = {"tensor": tensor, "pipeline": pipeline}
    batch = {"global_batch": None, "per_rank_batch": 2 * pipeline}
    return cell.changed(
        strategy=StrategySpec(name=LAYERED, options={"mesh": mesh}),
        recipe=recipe.model_copy(update=batch),
    )


def winner_of(search: Search, experiment: Experiment, cell: Trial) -> Experiment | None:
    """Return the fastest layout as the experiment's only cell; None if nothing fits."""
    if not search.front:
        return None
    best = search.front[0]
    options = {
        name: value.model_dump(exclude_defaults=True) if isinstance(value, Mesh) else value
        for name, value in best.options.items()
    }
    content = experiment.model_dump(mode="json")
    recipe = {
        **cell.recipe.model_dump(mode="json"),
        "activation_checkpointing": best.activation_checkpointing,
        "cpu_offload": best.cpu_offload,
        "gradient_accumulation": best.gradient_accumulation,
    }
    return Experiment.model_validate(
        {
            **content,
            "name": f"{experiment.name}-best",
            "workload": without_flash(cell.workload).model_dump(mode="json"),
            "recipe": recipe,
            "matrix": {
                "strategy": [{"name": best.strategy, **options}],
                "world_size": [search.ranks],
            },
            "placement": {"nodes": search.nodes},
        }
    )
