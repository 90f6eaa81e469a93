"""Evaluations on one of several ranks: code of a task may use its world as on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from shardmark.ranks.strategies.base import RankContext
from shardmark.ranks.train.one_rank import one_rank
from tests.distributed.ranks import run_ranks


def world() -> dict[str, object]:
    """Ask for the world in the ways that code of a task may use."""
    group: Any = dist.group.WORLD
    ones = torch.ones(2)
    dist.all_reduce(ones)
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, "value")
    return {
        "ranks": (dist.get_world_size(), dist.get_rank()),
        "backend": dist.get_backend(),
        "sum": ones.tolist(),
        "gathered": gathered,
        "functional": functional.all_reduce(torch.ones(2), "sum", group).tolist(),
    }


def work(process: RankContext) -> list[dict[str, object]]:
    seen = []
    for _ in range(2):  # the group of one is made once
        with one_rank():
            if process.rank == 0:  # no other rank takes part
                seen.append(world())
    return [*seen, world()]


def work_with_a_server(process: RankContext) -> float:
    """A parameter server never evaluates; all ranks make their next group together."""
    if process.rank == 0:
        with one_rank():
            dist.barrier()
    group: Any = dist.new_group([0, 1])
    summed = torch.ones(1)
    dist.all_reduce(summed, group=group)
    return float(summed)


def test_later_groups_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(work_with_a_server, world_size=2, directory=tmp_path) == [2.0, 2.0]


def test_one_rank_evaluates_without_the_others(tmp_path: Path) -> None:
    first, other = run_ranks(work, world_size=2, directory=tmp_path)
    both = {"backend": "gloo", "sum": [2.0, 2.0], "gathered": ["value"] * 2}
    alone = {"backend": "gloo", "sum": [1.0, 1.0], "gathered": ["value"]}
    alone |= {"ranks": (1, 0), "functional": [1.0, 1.0]}
    assert first[:2] == [alone, alone]
    for rank, after in enumerate((first[2], *other)):
        assert after == both | {"ranks": (2, rank), "functional": [2.0, 2.0]}, "the world is back"
