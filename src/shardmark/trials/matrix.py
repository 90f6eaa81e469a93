"""Unfolds the matrix of an experiment into the trials to run, in the order to run them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from shardmark.config import tables
from shardmark.config.axes import StrategyEntry, canonical, parse_entry
from shardmark.config.experiment import Experiment
from shardmark.config.problems import join, show
from shardmark.config.sizes import NODES, SIZE_AXES, Misfit, Size, sizes_of
from shardmark.core.errors import InputError
from shardmark.trials.cell_checks import check_batches, check_slow_ranks
from shardmark.trials.cells import Cell, describe, resolve_cell
from shardmark.trials.trial import StrategySpec, Trial
from shardmark.trials.trial_id import trial_id

if TYPE_CHECKING:
    from shardmark.strategies.base import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Cells that no machine could run."""

    strategy: StrategySpec | None
    """None where it is none of any strategy."""
    world_size: int | None
    """None where it does not matter."""
    reason: str
    nodes: int = 1

    @property
    def cell(self) -> str:
        ranks = self.world_size
        size = None if ranks is None else Size(world_size=ranks, nodes=self.nodes)
        return str(size) if self.strategy is None else describe(self.strategy, size)

    def __str__(self) -> str:
        return f"{self.cell}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run does."""

    trials: tuple[Trial, ...]
    """In the order to run: each repeat takes all cells once, in an order drawn from the seed."""
    left_out: tuple[LeftOut, ...]


def expand(experiment: Experiment, device_type: Literal["cuda", "cpu"]) -> Plan:
    """All trials of the experiment on that kind of device, and the cells that make no sense.

    Raises `InputError` where values do not go together or the batch cannot be shared.
    """
    left_out: list[LeftOut] = []
    cells = _cells(experiment, left_out)
    if not cells:
        reasons = "; ".join(map(str, left_out))
        raise InputError(f"{experiment.name}: matrix", "no cell makes sense", reasons)
    check_batches(experiment, cells)
    check_slow_ranks(experiment, cells)
    _check_distinct(experiment, cells, device_type)
    shuffle = random.Random(experiment.recipe.seed).shuffle
    shared = _differing_overrides(cells)
    tells_nodes = NODES in experiment.matrix or len({cell.nodes for cell in cells}) > 1
    trials: list[Trial] = []
    for repeat in range(experiment.measure.repeats):
        order = list(cells)
        shuffle(order)
        trials += (
            _trial(experiment, cell, device_type, repeat, shared, tells_nodes=tells_nodes)
            for cell in order
        )
    return Plan(trials=tuple(trials), left_out=tuple(left_out))


def _cells(experiment: Experiment, left_out: list[LeftOut]) -> list[Cell]:
    axes = {
        key: values
        for key, values in experiment.matrix.items()
        if key not in SIZE_AXES and key.partition(".")[0] != "strategy"
    }
    cells: list[Cell] = []
    errors: dict[str, InputError] = {}
    asked = _asked_sizes(experiment, left_out)
    for entry in _variants(experiment, left_out):
        sizes = _sizes(experiment, entry, asked, left_out)
        for size, values in product(sizes, _combinations(axes)):
            try:
                cells.append(resolve_cell(experiment, entry, size, values))
            except InputError as error:
                errors.setdefault(str(error), error)
    if errors:
        raise join(list(errors.values()))
    return cells


def _combinations(axes: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def _variants(experiment: Experiment, left_out: list[LeftOut]) -> Iterator[StrategyEntry]:
    """Each strategy entry with each combination of the axes that are strategies' options."""
    axes = {
        key.removeprefix("strategy."): values
        for key, values in experiment.matrix.items()
        if key.startswith("strategy.")
    }
    for entry in map(parse_entry, experiment.matrix["strategy"]):
        refused = [option for option in axes if not entry.accepts(option)]
        if refused:
            strategy = StrategySpec(name=entry.name, options=entry.options)
            reason = f"{entry.name} has no option {' and no option '.join(refused)}"
            left_out.append(LeftOut(strategy=strategy, world_size=None, reason=reason))
            continue
        for options in _combinations(axes):
            yield replace(entry, options={**entry.options, **options})


def _asked_sizes(experiment: Experiment, left_out: list[LeftOut]) -> list[Size]:
    """What the axes ask for, as far as their values go together."""
    placement = experiment.placement
    found = sizes_of(
        experiment.matrix, nodes=placement.nodes, ranks_per_node=placement.ranks_per_node
    )
    left_out += (
        LeftOut(strategy=None, world_size=size.world_size, reason=size.reason)
        for size in found
        if isinstance(size, Misfit)
    )
    sizes = [size for size in found if isinstance(size, Size)]
    if not sizes:
        reasons = "; ".join(map(str, left_out))
        where = f"{experiment.name}: world_size, placement"
        raise InputError(where, "no size that is asked for fits", reasons)
    return sizes


def _sizes(
    experiment: Experiment, entry: StrategyEntry, asked: Sequence[Size], left_out: list[LeftOut]
) -> list[Size]:
    """The sizes that make sense for the entry; one rank for a strategy that only runs alone."""
    strategy = tables.build_strategy(entry.name, entry.options)
    reasons = {size: _reason_against(strategy, size) for size in asked}
    sizes = [size for size, reason in reasons.items() if reason is None]
    one = Size(world_size=1)
    alone = not sizes and _reason_against(strategy, one) is None
    if not alone or not experiment.matrix.keys().isdisjoint(SIZE_AXES):
        spec = StrategySpec(name=entry.name, options=entry.options)
        left_out += (
            LeftOut(strategy=spec, world_size=size.world_size, nodes=size.nodes, reason=reason)
            for size, reason in reasons.items()
            if reason is not None
        )
    return [one] if alone else sizes


def _reason_against(strategy: Strategy, size: Size) -> str | None:
    """Why no machines could run the strategy so; None if some could."""
    training = len(strategy.layout(size.world_size).training_ranks)
    if training % size.nodes:
        processes = "1 process trains" if training == 1 else f"{training} processes train"
        return f"{processes}, which cannot be shared out to {size.nodes} nodes"
    return strategy.unsupported_reason(size.world_size, size.nodes)


def _check_distinct(experiment: Experiment, cells: Iterable[Cell], device_type: str) -> None:
    seen: set[str] = set()
    for cell in cells:
        identity = _id(cell, device_type, 0)
        if identity in seen:
            values = ", ".join(f"{key}={show(value)}" for key, value in cell.values.items())
            found = f"the cell {cell.title}{' with ' if values else ''}{values} is there twice"
            allowed = "keep one of the values that mean the same"
            raise InputError(f"{experiment.name}: matrix", found, allowed)
        seen.add(identity)


def _differing_overrides(cells: Sequence[Cell]) -> tuple[str, ...]:
    """Keys of the recipe that some strategy entry set, if the cells then differ in them."""
    keys = dict.fromkeys(key for cell in cells for key in cell.overrides)
    return tuple(
        key for key in keys if len({canonical(getattr(cell.recipe, key)) for cell in cells}) > 1
    )


def _id(cell: Cell, device_type: str, repeat: int) -> str:
    return trial_id(
        workload=cell.workload,
        recipe=cell.recipe,
        strategy=cell.strategy,
        world_size=cell.world_size,
        measure=cell.measure,
        device_type=device_type,
        slow_ranks=cell.slow_ranks,
        repeat=repeat,
        nodes=cell.nodes,
    )


def _trial(
    experiment: Experiment,
    cell: Cell,
    device_type: Literal["cuda", "cpu"],
    repeat: int,
    shared: Sequence[str],
    *,
    tells_nodes: bool,
) -> Trial:
    own = {f"recipe.{key}": getattr(cell.recipe, key) for key in shared}
    if tells_nodes:
        own[NODES] = cell.nodes
    return Trial(
        id=_id(cell, device_type, repeat),
        experiment=experiment.name,
        workload=cell.workload,
        recipe=cell.recipe,
        strategy=cell.strategy,
        world_size=cell.world_size,
        nodes=cell.nodes,
        measure=cell.measure,
        limits=experiment.limits,
        device_type=device_type,
        repeat=repeat,
        varied=cell.values | own,
        slow_ranks=cell.slow_ranks,
    )
