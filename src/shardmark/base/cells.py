"""Names of the cells of an experiment's matrix and of their axes, as results store them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from shardmark.base.masking import masked_commands
from shardmark.base.text import canonical, counted

DEFAULT_BASELINE = "single"
NODES = "placement.nodes"


def title_of(key: str) -> str:
    """Return the title of an axis in tables and notes: its key, or `nodes`."""
    return "nodes" if key == NODES else key


def ranks_and_nodes(world_size: int, nodes: int) -> str:
    ranks = counted(world_size, "rank")
    return ranks if nodes == 1 else f"{ranks} of {nodes} nodes"


def cell_id(trial: Mapping[str, Any]) -> str:
    """Return a hash of a stored trial's cell, which all its repeats share, whatever their seeds."""
    keys = ("workload", "recipe", "strategy", "world_size", "device_type", "nodes")
    content = {key: trial.get(key, 1) for key in keys}
    if trial.get("measure", {}).get("seeds", 1) > 1:
        recipe = trial["recipe"]
        content["recipe"] = {**recipe, "seed": recipe["seed"] - trial["repeat"]}
    return digest(content)[:12]


def digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a trial's content, with the secrets of its commands masked."""
    return hashlib.sha256(canonical(masked_commands(content)).encode()).hexdigest()
