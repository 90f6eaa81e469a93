"""How many ranks on how many nodes: what the axes ask for, and what of it fits together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

DEFAULT_WORLD_SIZE = 2
MOST_RANKS = 2**16
"""A world size above this is a slip of the hand."""
NODES = "placement.nodes"
SIZE_AXES = ("world_size", NODES, "placement.ranks_per_node")


def title_of(key: str) -> str:
    """What tables and notes call an axis: that of nodes by one word, others by their key."""
    return "nodes" if key == NODES else key


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Training ranks, and the nodes that they are shared out to equally."""

    world_size: int
    nodes: int = 1

    def __str__(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return ranks if self.nodes == 1 else f"{ranks} of {self.nodes} nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """Values of the three axes that contradict each other."""

    world_size: int
    reason: str


def sizes_of(
    matrix: Mapping[str, Sequence[Any]], *, nodes: int | None, ranks_per_node: int | None
) -> list[Size | Misfit]:
    """Every size that the matrix asks for; `nodes` and `ranks_per_node` are the file's own."""
    axes: dict[str, Sequence[int | None]] = {
        "world_size": [None],
        "placement.nodes": [nodes],
        "placement.ranks_per_node": [ranks_per_node],
    }
    axes |= {key: matrix[key] for key in SIZE_AXES if key in matrix}
    found = (_size(*values) for values in product(*(axes[key] for key in SIZE_AXES)))
    return list(dict.fromkeys(found))


def _size(world_size: int | None, nodes: int | None, each: int | None) -> Size | Misfit:
    if world_size is None:
        nodes = nodes or 1
        world_size = nodes * (each or max(1, DEFAULT_WORLD_SIZE // nodes))
        if world_size > MOST_RANKS:
            return Misfit(world_size=world_size, reason=f"allowed are at most {MOST_RANKS} ranks")
        return Size(world_size=world_size, nodes=nodes)
    if nodes is None:
        nodes = max(1, world_size // each) if each else 1
    if nodes * (each or world_size // nodes) == world_size:
        return Size(world_size=world_size, nodes=nodes)
    reason = (
        f"{_count(nodes, 'node')} with {_count(each, 'rank')} each are not {world_size} ranks"
        if each
        else f"{_count(world_size, 'rank')} cannot be shared out equally to {nodes} nodes"
    )
    return Misfit(world_size=world_size, reason=reason)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
