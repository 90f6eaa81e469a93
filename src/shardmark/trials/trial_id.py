"""Names a trial by what it does: the same content has the same name in every run and process."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from shardmark.config.axes import canonical
from shardmark.core.recipe import Measure, Recipe
from shardmark.trials.trial import StrategySpec


def trial_id(
    *,
    workload: dict[str, Any],
    recipe: Recipe,
    strategy: StrategySpec,
    world_size: int,
    measure: Measure,
    device_type: str,
    slow_ranks: Mapping[int, float],
    repeat: int,
    nodes: int = 1,
) -> str:
    """E.g. `fsdp-hybrid-w4-bf16-r0-1a2b3c4d`, or `...-w4-n2-...` on two nodes.

    The digits are a hash of all that defines the trial.

    Its time limit and how many repeats there are do not: more of either keeps finished trials.
    """
    content = {
        "workload": workload,
        "recipe": recipe.model_dump(mode="json"),
        "strategy": strategy.model_dump(mode="json"),
        "world_size": world_size,
        "measure": measure.model_dump(mode="json", exclude={"repeats", "verify", "link_seconds"}),
        "device_type": device_type,
        "repeat": repeat,
    }
    # Without slow ranks or nodes, the names are those of runs from before there were any.
    if nodes > 1:
        content["nodes"] = nodes
    if slow_ranks:
        content["slow_ranks"] = {str(rank): factor for rank, factor in slow_ranks.items()}
    digits = hashlib.sha256(canonical(content).encode()).hexdigest()[:8]
    name = re.sub(r"[^a-z0-9]+", "-", strategy.name.lower()).strip("-")
    size = f"w{world_size}" if nodes == 1 else f"w{world_size}-n{nodes}"
    return f"{name}-{size}-{recipe.precision}-r{repeat}-{digits}"


def cell_id(trial: Mapping[str, Any]) -> str:
    """Names what a stored trial trains, and on what: the same for all its repeats."""
    keys = ("workload", "recipe", "strategy", "world_size", "device_type")
    content = {key: trial[key] for key in keys}
    if trial.get("nodes", 1) > 1:
        content["nodes"] = trial["nodes"]
    return hashlib.sha256(canonical(content).encode()).hexdigest()[:12]
