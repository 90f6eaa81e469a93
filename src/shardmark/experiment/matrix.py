"""Unfolds the matrix of an experiment into the trials to run, in the order to run them."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from shardmark.errors import InputError
from shardmark.experiment import tables
from shardmark.experiment.axes import StrategyEntry, canonical, parse_entry
from shardmark.experiment.cells import Cell, describe, resolve_cell
from shardmark.experiment.problems import join, show
from shardmark.experiment.schema import Experiment, StrategySpec, Trial
from shardmark.experiment.trial_id import trial_id

DEFAULT_WORLD_SIZES = (2,)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Cells that no machine could run."""

    strategy: StrategySpec
    world_size: int | None
    """None where it does not matter."""
    reason: str

    @property
    def cell(self) -> str:
        return describe(self.strategy, self.world_size)

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
    _check_batches(experiment, cells)
    _check_slow_ranks(experiment, cells)
    _check_distinct(experiment, cells, device_type)
    shuffle = random.Random(experiment.recipe.seed).shuffle
    shared = _differing_overrides(cells)
    trials: list[Trial] = []
    for repeat in range(experiment.measure.repeats):
        order = list(cells)
        shuffle(order)
        trials += (_trial(experiment, cell, device_type, repeat, shared) for cell in order)
    return Plan(trials=tuple(trials), left_out=tuple(left_out))


def _cells(experiment: Experiment, left_out: list[LeftOut]) -> list[Cell]:
    axes = {
        key: values
        for key, values in experiment.matrix.items()
        if key != "world_size" and key.partition(".")[0] != "strategy"
    }
    cells: list[Cell] = []
    errors: dict[str, InputError] = {}
    for entry in _variants(experiment, left_out):
        sizes = _world_sizes(experiment.matrix.get("world_size"), entry, left_out)
        for world_size, values in product(sizes, _combinations(axes)):
            try:
                cells.append(resolve_cell(experiment, entry, world_size, values))
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


def _world_sizes(
    asked: Sequence[int] | None, entry: StrategyEntry, left_out: list[LeftOut]
) -> list[int]:
    """The world sizes that make sense for the entry; 1 for a strategy that only runs alone."""
    strategy = tables.build_strategy(entry.name, entry.options)
    reasons = {size: strategy.makes_sense(size) for size in asked or DEFAULT_WORLD_SIZES}
    sizes = [size for size, reason in reasons.items() if reason is None]
    alone = not sizes and strategy.makes_sense(1) is None
    if asked is not None or not alone:
        spec = StrategySpec(name=entry.name, options=entry.options)
        left_out += (
            LeftOut(strategy=spec, world_size=size, reason=reason)
            for size, reason in reasons.items()
            if reason is not None
        )
    return [1] if alone else sizes


def _check_batches(experiment: Experiment, cells: Iterable[Cell]) -> None:
    """Every training rank must get the same number of samples, in equal micro-batches."""
    users: dict[tuple[str, int], dict[int, Cell]] = defaultdict(dict)
    for cell in cells:
        micro_batches = cell.recipe.gradient_accumulation
        if cell.recipe.global_batch is not None:
            users["global_batch", cell.recipe.global_batch].setdefault(
                cell.batch_parts * micro_batches, cell
            )
        elif cell.recipe.per_rank_batch is not None:
            users["per_rank_batch", cell.recipe.per_rank_batch].setdefault(micro_batches, cell)
    errors = [
        _batch_error(f"{experiment.name}: recipe.{key}", batch, cell, math.lcm(*by_parts))
        for (key, batch), by_parts in users.items()
        for parts, cell in by_parts.items()
        if batch % parts
    ]
    if errors:
        raise join(errors)


def _batch_error(where: str, batch: int, cell: Cell, multiple: int) -> InputError:
    ranks, micro_batches = cell.batch_parts, cell.recipe.gradient_accumulation
    shares = f"{ranks} training ranks" if cell.recipe.global_batch is not None else ""
    if micro_batches > 1:
        shares += f"{' x ' if shares else ''}{micro_batches} micro-batches"
    below = batch // multiple * multiple
    nearest = f"{below} and {below + multiple}" if below else str(multiple)
    found = f"{batch} samples cannot be shared equally by {shares} ({cell.title})"
    return InputError(where, found, f"nearest batches that every cell can share: {nearest}")


def _check_slow_ranks(experiment: Experiment, cells: Sequence[Cell]) -> None:
    """A rank that no cell has was meant to be another."""
    most = max(cell.world_size for cell in cells)
    for rank in sorted({rank for cell in cells for rank in cell.slow_ranks}):
        if rank >= most:
            raise InputError(
                f"{experiment.name}: slow_ranks",
                f"there is no rank {rank}: the largest world size is {most}",
                f"ranks 0 to {most - 1}",
            )


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
    )


def _trial(
    experiment: Experiment,
    cell: Cell,
    device_type: Literal["cuda", "cpu"],
    repeat: int,
    shared: Sequence[str],
) -> Trial:
    return Trial(
        id=_id(cell, device_type, repeat),
        experiment=experiment.name,
        workload=cell.workload,
        recipe=cell.recipe,
        strategy=cell.strategy,
        world_size=cell.world_size,
        measure=cell.measure,
        limits=experiment.limits,
        device_type=device_type,
        repeat=repeat,
        varied=cell.values | {f"recipe.{key}": getattr(cell.recipe, key) for key in shared},
        slow_ranks=cell.slow_ranks,
    )
