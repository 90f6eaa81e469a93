"""Table of the work that each strategy adds to a script: packages, arguments, lines, features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from shardmark.base.errors import ShardmarkError, StrategyUnavailable
from shardmark.base.machine import Machine
from shardmark.base.recipe import MAX_RANKS, Recipe
from shardmark.base.table.table import Column, Columns, Missing, Table, table_of
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.analysis.compare.rows import Row
from shardmark.bench.report.export.examples import ONE_DEVICE, changed_lines, code_lines
from shardmark.bench.report.export.launch_configuration import (
    LaunchConfiguration,
    launch_configuration,
)
from shardmark.ranks.strategies.base import Strategy
from shardmark.ranks.strategies.single import Single
from shardmark.ranks.trial import Trial

TITLE = "Integration effort"
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "gradient accumulation": {"gradient_accumulation": 2},
    "gradient clipping": {"gradient_clipping": 1.0},
    "synchronised batch norm": {"sync_batch_norm": True},
    "activation checkpointing": {"activation_checkpointing": True},
    "compiled blocks": {"compile": "blocks"},
    "compiled model": {"compile": "model"},
    "channels_last": {"channels_last": True},
    "fused optimizer": {"optimizer.implementation": "fused"},
}
"""Features of a recipe, by the keys that switch them on."""
PACKAGES_NOTE = (
    "Packages: to install beside PyTorch. Arguments: values that `shardmark export` sets for the"
    " wrapper, or in DeepSpeed's file, defaults included."
)
LAUNCHERS_NOTE = (
    "Launchers: targets of `shardmark export` on the device of the run. Features lost: on CUDA"
    " devices, the strategy refuses the run's recipe with them, and one device does not."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The work of one strategy."""

    strategy: str
    label: str
    """The strategy with its options."""
    packages: tuple[str, ...]
    features_lost: tuple[str, ...]
    configuration: LaunchConfiguration | None
    """None if the strategy runs only in Shardmark's processes."""

    @property
    def arguments(self) -> int | None:
        configuration = self.configuration
        if configuration is None:
            return None
        return _leaves(configuration.deepspeed or configuration.arguments)

    @property
    def changed_lines(self) -> int | Missing:
        if self.configuration is None:
            return Missing("it runs only in Shardmark's processes")
        if self.configuration.example is None:
            return Missing("there is no example script: they depend on the model")
        return changed_lines(self.configuration.example)

    @property
    def launchers(self) -> tuple[str, ...]:
        configuration = self.configuration
        if configuration is None:
            return ()
        written = {"accelerate": configuration.accelerate, "deepspeed": configuration.deepspeed}
        return ("torchrun", *(name for name, file in written.items() if file is not None))


def effort_tables(comparison: Comparison, _: str = "") -> list[Table]:
    """Return one table, with a row for each strategy with its options."""
    efforts = efforts_of(comparison.rows)
    columns: Columns[Effort] = [
        (Column("strategy", numeric=False, names_row=True), lambda e: e.label),
        (Column("packages", numeric=False), lambda e: listed(e.packages)),
        (Column("arguments"), lambda e: e.arguments),
        (Column("changed_lines", "lines"), lambda e: e.changed_lines),
        (Column("launchers", numeric=False), lambda e: listed(e.launchers)),
        (
            Column("features_lost", "features lost", numeric=False),
            lambda e: listed(e.features_lost),
        ),
    ]
    if not efforts:
        note = "No row is of a strategy: a script distributes its training itself."
        return [Table(title=TITLE, notes=(note,))]
    lines_note = (
        "Lines: added, changed or removed in a script for one device, in fp32, with"
        f" {len(code_lines(ONE_DEVICE))} lines of code. `shardmark export --to torchrun` writes the"
        " script of a strategy as loop.py. Options of a strategy may need more lines."
    )
    return [table_of(TITLE, efforts, columns, (PACKAGES_NOTE, lines_note, LAUNCHERS_NOTE))]


def efforts_of(rows: Sequence[Row]) -> list[Effort]:
    """Return the effort of each strategy with its options, in the order of the rows."""
    efforts: dict[str, Effort] = {}
    for row in rows:
        try:
            trial = Trial.model_validate(row.trials[0].trial)
            strategy = trial.built_strategy
        except (ValidationError, ShardmarkError):
            continue  # an earlier version's, or a plug-in's that is not installed
        if trial.script is None and row.label not in efforts:
            efforts[row.label] = Effort(
                strategy=row.strategy,
                label=row.label,
                packages=strategy.packages(),
                features_lost=tuple(_features_lost(strategy, trial)),
                configuration=launch_configuration(
                    strategy, trial.recipe, trial.layout, trial.device_type
                ),
            )
    return [*efforts.values()]


def listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _features_lost(strategy: Strategy, trial: Trial) -> Iterator[str]:
    """Yield the features that the strategy refuses on CUDA devices and one device does not."""
    for feature, keys in FEATURES.items():
        recipe = _with(trial.recipe, keys)
        if _refuses(strategy, trial.world_size, recipe) and not _refuses(Single(), 1, recipe):
            yield feature


def _with(recipe: Recipe, keys: Mapping[str, Any]) -> Recipe:
    for key, value in keys.items():
        section, _, name = key.rpartition(".")
        changed = getattr(recipe, section).model_copy(update={name: value}) if section else value
        recipe = recipe.model_copy(update={section or name: changed})
    return recipe


def _refuses(strategy: Strategy, world_size: int, recipe: Recipe) -> bool:
    try:
        strategy.check(world_size, Machine.predicted("cuda", MAX_RANKS), recipe)
    except StrategyUnavailable:
        return True
    return False


def _leaves(value: object) -> int:
    return sum(map(_leaves, value.values())) if isinstance(value, Mapping) else 1
