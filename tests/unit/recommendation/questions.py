"""Cells that the tests of recommendations share, and how they ask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardmark.analysis.advise.recommendation import Recommendation, recommend
from shardmark.analysis.compare.comparison import Comparison
from shardmark.report.answers.recommendation import recommendation_lines
from tests.unit.recommendation.invented_rows import MIB, Cell

SINGLE = Cell(strategy="single", world_size=1, rates=(100, 101, 99), peaks=(90 * MIB,))
DDP = Cell(strategy="ddp", world_size=2, rates=(180, 182, 181), peaks=(80 * MIB,))
FSDP = Cell(strategy="fsdp", world_size=2, rates=(150, 151, 152), peaks=(40 * MIB,))


def one_of(comparison: Comparison, goal: str, size: int | None = None) -> Recommendation:
    (found,) = [one for one in recommend(comparison) if (one.goal, one.world_size) == (goal, size)]
    return found


def line_of(comparison: Comparison, start: str) -> str:
    (found,) = [line for line in recommendation_lines(comparison) if line.startswith(start)]
    return found


ASYNC = Cell(
    strategy="ps-async",
    world_size=2,
    rates=(240, 241, 239),
    peaks=(85 * MIB,),
    equivalent=None,
    guarantee="every gradient is applied once, however stale",
    qualities=(0.50, 0.51, 0.49),
)


def with_(cell: Cell, **changes: Any) -> Cell:
    return replace(cell, **changes)
