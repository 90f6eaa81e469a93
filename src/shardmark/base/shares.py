"""Shares of a global batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A share of every global batch: slice `index` of `count` equal slices."""

    index: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShard:
    """The samples that a rank processes in one step: a share of that step's global batch."""

    step: int
    shard: Shard
