"""Which part of a step's samples a rank takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One training rank's share of every global batch: slice `index` of `count` equal ones."""

    index: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShard:
    """What one rank computes at once: one share of one step of the training."""

    step: int
    shard: Shard
