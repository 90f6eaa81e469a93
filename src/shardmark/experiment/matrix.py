"""Expansion of an experiment's matrix into trials, in the order in which they run."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from shardmark.base.cells import DEFAULT_BASELINE, NODES, ranks_and_nodes
from shardmark.base.errors import InputError
from shardmark.base.recipe import MAX_RANKS, Measure, Recipe, SlowRanks
from shardmark.base.text import counted
from shardmark.experiment.axes import SIZE_AXES, assigned, named
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.messages import Location, dotted, join, show
from shardmark.experiment.problems import explain
from shardmark.experiment.tasks import WorkloadSection
from shardmark.ranks.strategies import SHARED_OPTIONS, option_names
from shardmark.ranks.strategies.base import Strategy
from shardmark.ranks.trial import StrategySpec, Trial, strategy_of, trial_id
from shardmark.ranks.workloads.script.options import ScriptOptions

DEFAULT_WORLD_SIZE = 2
MAX_TRIALS = 10_000
"""Maximum number of trials, which take months and still fit into memory."""
MAX_RANKS_OF_CELLS = 2**18
"""Maximum number of ranks of all cells together, whose layouts must fit into memory."""
DeviceType = Literal["cuda", "cpu"]
SECTIONS: Mapping[str, TypeAdapter[Any]] = {
    "workload": TypeAdapter(WorkloadSection),
    "recipe": TypeAdapter(Recipe),
    "measure": TypeAdapter(Measure),
    "slow_ranks": TypeAdapter(SlowRanks),
}
"""Sections that axes can change, in addition to the strategy and the world size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Cells that no machine could run, with the reason."""

    strategy: StrategySpec | None
    """None if the reason concerns the world size alone."""
    world_size: int | None
    """None if the reason concerns the strategy alone."""
    reason: str
    nodes: int = 1
    runs_on: tuple[str, ...] = ()
    """Descriptions of the sizes on which the strategy runs."""

    @property
    def cell(self) -> str:
        size = None if self.world_size is None else ranks_and_nodes(self.world_size, self.nodes)
        return " on ".join(str(part) for part in (self.strategy, size) if part is not None)

    def __str__(self) -> str:
        runs = f" (it runs on {', '.join(self.runs_on)})" if self.runs_on else ""
        return f"{self.cell}{runs}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlan:
    """The trials of a run."""

    trials: tuple[Trial, ...]
    """Trials in the order in which they run: each repeat has all cells in a random order."""
    left_out: tuple[LeftOut, ...]
    twin: Trial | None = None
    """Trial that measures the effect of rounding on the quality, after the first repeat."""
    strategies: tuple[str, ...] = ()
    """Names of the strategies in the order of the matrix."""

    @property
    def with_twin(self) -> tuple[Trial, ...]:
        """Trials and the twin, in the order in which they run."""
        twins = () if self.twin is None else (self.twin,)
        return tuple(sorted((*self.trials, *twins), key=lambda trial: trial.repeat))

    def on(self, device_type: DeviceType) -> TrialPlan:
        """Return this plan for a device type, without building strategies and layouts again."""

        def place(trial: Trial) -> Trial:
            return _with_id(trial.model_copy(update={"device_type": device_type}))

        twin = None if self.twin is None else place(self.twin)
        return replace(self, trials=tuple(map(place, self.trials)), twin=twin)


def expand(experiment: Experiment, device_type: DeviceType = "cpu") -> TrialPlan:
    """Return the trials of the experiment for a device type, and the cells that cannot run.

    Raises `InputError` if values contradict each other or the batch cannot be divided evenly.
    """
    left_out: list[LeftOut] = []
    asked = _asked_sizes(experiment, left_out)
    cells = _cells(
        experiment, device_type, left_out, lambda spec: _sizes(experiment, spec, asked, left_out)
    )
    cells = _with_equal_threads(cells)
    _check_batches(cells)
    _check_each(cells)
    _check_seeds(experiment, cells)
    count = len(cells) * experiment.measure.repeats.at_most
    if count > MAX_TRIALS:
        place = f"{experiment.name}: measure.repeats"
        raise InputError(place, f"{count:,} trials", f"allowed are at most {MAX_TRIALS:,}")
    shuffle = random.Random(experiment.recipe.seed).shuffle
    trials: list[Trial] = []
    for repeat in range(experiment.measure.repeats.at_most):
        order = [_repeat_of(cell, repeat) for cell in cells]
        shuffle(order)
        trials += map(_with_id, order)
    return TrialPlan(
        trials=tuple(trials),
        left_out=tuple(left_out),
        twin=_twin(cells),
        strategies=tuple(dict.fromkeys(cell.strategy.name for cell in cells)),
    )


def _with_equal_threads(cells: Sequence[Trial]) -> list[Trial]:
    """Return cells that divide the cores by the ranks of the largest one."""
    counts = [cell.layout.processes // cell.nodes for cell in cells]
    most = max(counts, default=1)
    return [
        cell.model_copy(update={"ranks_on_cores": most if count < most else None})
        for cell, count in zip(cells, counts, strict=True)
    ]


def _repeat_of(cell: Trial, repeat: int) -> Trial:
    """Return a repeat of the cell; with several seeds it takes the next seed."""
    update: dict[str, Any] = {"repeat": repeat}
    if cell.measure.seeds > 1:
        update["recipe"] = cell.recipe.model_copy(update={"seed": cell.recipe.seed + repeat})
    return cell.model_copy(update=update)


def _check_seeds(experiment: Experiment, cells: Sequence[Trial]) -> None:
    """Raise `InputError` if the repeats of a cell cannot take the seeds after the recipe's."""
    seeds, place = experiment.measure.seeds, f"{experiment.name}: measure.seeds"
    if seeds > 1 and "recipe.seed" in experiment.matrix:
        values = show(experiment.matrix["recipe.seed"])
        problem = f"{seeds}, and recipe.seed is an axis of the matrix, {values}"
        raise InputError(place, problem, "keep one: seeds pools its repeats, an axis makes rows")
    if seeds > 1 and any(cell.script is not None for cell in cells):
        problem = f"{seeds}, and a script seeds itself"
        raise InputError(place, problem, "1; pass seeds as arguments of variants")
    last = max(cell.recipe.seed for cell in cells) + seeds - 1
    if last >= 2**32:
        raise InputError(place, f"the last seed would be {last}", f"at most {2**32 - 1}")


def _with_id(trial: Trial) -> Trial:
    return trial.model_copy(update={"id": trial_id(trial)})


def _twin(cells: Sequence[Trial]) -> Trial | None:
    """Return a copy of the baseline's first cell with different initial weights.

    None if no quality is compared.
    """
    cell = min(cells, key=lambda cell: cell.strategy.name != DEFAULT_BASELINE)
    measure, one_node = cell.measure, {NODES: 1}
    alone = sum(cell.varied | one_node == other.varied | one_node for other in cells) == 1
    evaluated = measure.evaluate != "never" and cell.script is None
    if alone or not (measure.twin and measure.verify and evaluated):
        return None
    # Only its quality is used, so it needs no measured windows and no probe.
    shorter = {"warmup_seconds": 0.0, "window_seconds": 0.0, "probe": False, "max_remeasure": 0}
    update = {"twin": True, "measure": measure.model_copy(update=shorter)}
    return _with_id(cell.model_copy(update=update))


def cells_of_any_size(experiment: Experiment) -> tuple[list[Trial], list[LeftOut]]:
    """Return the cells of the experiment on one rank, and strategies without a required option.

    Axes of sizes are ignored.  Raises `InputError` if values contradict each other.
    """
    left_out: list[LeftOut] = []
    matrix = {key: values for key, values in experiment.matrix.items() if key not in SIZE_AXES}
    sizeless = experiment.model_copy(update={"matrix": matrix})
    return _cells(sizeless, "cuda", left_out, lambda _: [(1, 1)]), left_out


def _cells(
    experiment: Experiment,
    device_type: DeviceType,
    left_out: list[LeftOut],
    sizes_of: Callable[[StrategySpec], Sequence[tuple[int, int]]],
) -> list[Trial]:
    """Return the first repeat of each cell, without its identifier."""
    axes = {
        key: values
        for key, values in experiment.matrix.items()
        if key not in SIZE_AXES and key.partition(".")[0] != "strategy"
    }
    cells: list[Trial] = []
    errors: dict[str, InputError] = {}
    entries = list(_entries(experiment, left_out))
    combinations, ranks = _combinations(axes), 0
    for spec, overrides in entries:
        sizes = sizes_of(spec)
        ranks += len(combinations) * sum(world_size for world_size, _ in sizes)
        if ranks > MAX_RANKS_OF_CELLS:
            raise InputError(
                f"{experiment.name}: matrix",
                f"{ranks:,} ranks in all cells",
                f"allowed are at most {MAX_RANKS_OF_CELLS:,}",
            )
        for values in combinations:
            try:
                sections = _sections(experiment, values | overrides)
            except InputError as error:
                errors.setdefault(str(error), error)
                continue
            cells += (
                Trial(
                    id="",
                    experiment=experiment.name,
                    strategy=spec,
                    world_size=world_size,
                    nodes=nodes,
                    limits=experiment.limits,
                    device_type=device_type,
                    varied=values,
                    **sections,
                )
                for world_size, nodes in sizes
            )
    if errors:
        raise join(list(errors.values()))
    if not cells:
        reasons = "; ".join(map(str, left_out))
        raise InputError(f"{experiment.name}: matrix", "no cell makes sense", reasons)
    overridden = {key for _, overrides in entries for key in overrides}
    return _with_overrides(cells, sorted(overridden), experiment.matrix)


def _with_overrides(
    cells: Sequence[Trial], overridden: Iterable[str], matrix: Mapping[str, Any]
) -> list[Trial]:
    """Add to `varied` the recipe keys that strategies override and in which cells differ."""
    varied = {
        key: [getattr(cell.recipe, key.removeprefix("recipe.")) for cell in cells]
        for key in overridden
        if key.startswith("recipe.")
    }
    varied = {key: values for key, values in varied.items() if len(set(values)) > 1}
    nodes = [cell.nodes for cell in cells]
    if NODES in matrix or len(set(nodes)) > 1:
        varied[NODES] = nodes
    return [
        cell.model_copy(
            update={"varied": cell.varied | {key: values[index] for key, values in varied.items()}}
        )
        for index, cell in enumerate(cells)
    ]


def _combinations(axes: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def _entries(
    experiment: Experiment, left_out: list[LeftOut]
) -> Iterator[tuple[StrategySpec, dict[str, Any]]]:
    """Yield each strategy with each combination of its options, and the keys that it overrides."""
    if isinstance(experiment.workload, ScriptOptions):
        for variant in experiment.matrix["strategy"]:
            command = experiment.workload.with_arguments(variant["arguments"])
            yield StrategySpec(name=variant["name"]), {"workload.command": command}
        return
    axes = {
        key.removeprefix("strategy."): values
        for key, values in experiment.matrix.items()
        if key.startswith("strategy.")
    }
    for value in experiment.matrix["strategy"]:
        entry = dict(named(value))
        name = entry.pop("name")
        overrides = {f"recipe.{key}": entry.pop(key) for key in SHARED_OPTIONS if key in entry}
        refused = [option for option in axes if option not in option_names(name)]
        if refused:
            reason = f"{name} has no option {' and no option '.join(refused)}"
            spec = StrategySpec(name=name, options=entry)
            left_out.append(LeftOut(strategy=spec, world_size=None, reason=reason))
            continue
        for options in _combinations(axes):
            yield StrategySpec(name=name, options={**entry, **options}), overrides


def _asked_sizes(experiment: Experiment, left_out: list[LeftOut]) -> list[tuple[int, int]]:
    """Return the world sizes and nodes of the axes, without contradictory combinations."""
    axes: dict[str, Sequence[int | None]] = {
        "world_size": [None],
        NODES: [experiment.placement.nodes],
        "placement.ranks_per_node": [experiment.placement.ranks_per_node],
    }
    axes |= {key: experiment.matrix[key] for key in SIZE_AXES if key in experiment.matrix}
    sizes: dict[tuple[int, int], None] = {}
    for world_size, nodes, ranks_per_node in product(*(axes[key] for key in SIZE_AXES)):
        size, reason = _size(world_size, nodes, ranks_per_node)
        if reason is None:
            sizes[size] = None
        else:
            left_out.append(LeftOut(strategy=None, world_size=size[0], reason=reason))
    if not sizes:
        place = f"{experiment.name}: world_size, placement"
        reasons = "; ".join(map(str, left_out))
        raise InputError(place, "no size that is asked for fits", reasons)
    return list(sizes)


def _size(
    world_size: int | None, nodes: int | None, ranks_per_node: int | None
) -> tuple[tuple[int, int], str | None]:
    """Return the world size and the nodes, and the reason if the values contradict each other.

    Missing values follow from the others.
    """
    if world_size is None:
        nodes = nodes or 1
        world_size = nodes * (ranks_per_node or max(1, DEFAULT_WORLD_SIZE // nodes))
        too_many = f"allowed are at most {MAX_RANKS} ranks" if world_size > MAX_RANKS else None
        return (world_size, nodes), too_many
    if nodes is None:
        nodes = max(1, world_size // ranks_per_node) if ranks_per_node else 1
    if nodes * (ranks_per_node or world_size // nodes) == world_size:
        return (world_size, nodes), None
    ranks = ranks_and_nodes(world_size, 1)
    if ranks_per_node:
        machines = counted(nodes, "node")
        reason = f"{machines} with {ranks_and_nodes(ranks_per_node, 1)} each are not {ranks}"
    else:
        reason = f"{ranks} cannot be shared out equally to {nodes} nodes"
    return (world_size, nodes), reason


def _sizes(
    experiment: Experiment,
    spec: StrategySpec,
    asked: Sequence[tuple[int, int]],
    left_out: list[LeftOut],
) -> list[tuple[int, int]]:
    """Return the sizes on which the strategy can run; one rank if it runs only on a single one."""
    strategy = strategy_of(spec, experiment.workload)
    reasons = {size: unsupported_reason(strategy, *size) for size in asked}
    sizes = [size for size, reason in reasons.items() if reason is None]
    alone = not sizes and unsupported_reason(strategy, 1, 1) is None
    sizes = [(1, 1)] if alone else sizes
    if not alone or not experiment.matrix.keys().isdisjoint(SIZE_AXES):
        left_out += (
            LeftOut(
                strategy=spec,
                world_size=world_size,
                nodes=nodes,
                reason=reason,
                runs_on=tuple(ranks_and_nodes(*size) for size in sizes),
            )
            for (world_size, nodes), reason in reasons.items()
            if reason is not None
        )
    return sizes


def unsupported_reason(strategy: Strategy, world_size: int, nodes: int) -> str | None:
    """Return the reason why no machine can run the strategy in this size, or None."""
    training = len(strategy.layout(world_size).training_ranks)
    if training % nodes:
        processes = "1 process trains" if training == 1 else f"{training} processes train"
        return f"{processes}, which cannot be shared out to {nodes} nodes"
    return strategy.unsupported_reason(world_size, nodes)


def _sections(experiment: Experiment, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the experiment's sections with the values of a cell.

    Raises `InputError` if values contradict each other.
    """
    sections = {}
    for section, adapter in SECTIONS.items():
        base = getattr(experiment, section)
        changes = {key: value for key, value in values.items() if key.partition(".")[0] == section}
        # Without defaults: another optimizer or task may not have the same keys.
        data = base.model_dump(mode="json", exclude_defaults=True) if "slow" not in section else {}
        if section == "workload":
            data["name"] = base.name
        for key, value in changes.items():
            _, *path = key.split(".")
            data = assigned(data, path, value) if path else value

        def place_of(location: Location, changes: Mapping[str, Any] = changes) -> str:
            if dotted(location) in changes:
                return f"{experiment.name}: matrix.{dotted(location)}"
            cells = ", ".join(f"{key}={show(value)}" for key, value in changes.items())
            return f"{experiment.name}: {dotted(location)} in the cells with {cells}"

        try:
            sections[section] = adapter.validate_python(data) if changes else base
        except ValidationError as error:
            raise explain(error, place_of, prefix=(section,)) from None
    return sections


def _check_batches(cells: Iterable[Trial]) -> None:
    """Check that shares and micro-batches of every step have equally many samples."""
    parts: dict[tuple[str, int], dict[int, Trial]] = defaultdict(dict)
    for cell in cells:
        recipe, micro_batches = cell.recipe, cell.recipe.gradient_accumulation
        if recipe.global_batch is not None:
            equal_parts = cell.layout.shares * micro_batches
            parts["global_batch", recipe.global_batch].setdefault(equal_parts, cell)
        elif recipe.per_rank_batch is not None:
            parts["per_rank_batch", recipe.per_rank_batch].setdefault(micro_batches, cell)
    errors = [
        _batch_error(key, batch, cell, math.lcm(*by_parts))
        for (key, batch), by_parts in parts.items()
        for equal_parts, cell in by_parts.items()
        if batch % equal_parts
    ]
    if errors:
        raise join(errors)


def _batch_error(key: str, batch: int, cell: Trial, multiple: int) -> InputError:
    ranks = [f"{cell.layout.shares} training ranks"] if key == "global_batch" else []
    micro_batches = cell.recipe.gradient_accumulation
    shares = [*ranks, *([f"{micro_batches} micro-batches"] if micro_batches > 1 else [])]
    below = batch // multiple * multiple
    nearest = f"{below} and {below + multiple}" if below else str(multiple)
    return InputError(
        f"{cell.experiment}: recipe.{key}",
        f"{batch} samples cannot be shared equally by {' x '.join(shares)} ({cell.title})",
        f"nearest batches that every cell can share: {nearest}",
    )


def _check_each(cells: Sequence[Trial]) -> None:
    """Check slow ranks, memory formats and limits of every cell, and reject identical cells."""
    most = max(cell.world_size for cell in cells)
    seen: set[str] = set()
    for cell in cells:
        if (rank := max(cell.slow_ranks, default=0)) >= most:
            raise InputError(
                f"{cell.experiment}: slow_ranks",
                f"there is no rank {rank}: the largest world size is {most}",
                f"ranks 0 to {most - 1}",
            )
        if cell.recipe.channels_last and not cell.workload.on_pictures:
            raise InputError(
                f"{cell.experiment}: recipe.channels_last",
                f"true, and {cell.workload.name} has no images",
                "false: it is for convolutions on images",
            )
        if cell.recipe.weights != "fp32" and not cell.workload.casts_parameters:
            raise InputError(
                f"{cell.experiment}: recipe.weights",
                f"{cell.recipe.weights}, and {cell.workload.name} computes parts in fp32 alone",
                "fp32; recipe.precision: bf16 computes in bf16 where possible",
            )
        least = sum(cell.least_seconds)
        if cell.limits.trial_seconds <= least:
            raise InputError(
                f"{cell.experiment}: limits.trial_seconds",
                f"{cell.limits.trial_seconds:g} s, and warm-up and windows take {least:g} s",
                f"more than {least:g}; or set measure.warmup_seconds and measure.window_seconds",
            )
        if (identity := trial_id(cell)) in seen:
            values = "".join(f", {key}={show(value)}" for key, value in cell.varied.items())
            raise InputError(
                f"{cell.experiment}: matrix",
                f"the cell {cell.title}{values} is there twice",
                "keep one of the values that mean the same",
            )
        seen.add(identity)
