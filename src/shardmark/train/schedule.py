"""Learning rates and seeds as functions of the step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

from shardmark.core.recipe import Recipe


def learning_rate_of(recipe: Recipe, total_steps: int) -> Callable[[int], float]:
    """Step index -> learning rate.

    `cosine` falls towards zero, which it would reach one step after the last (Loshchilov and
    Hutter, ICLR 2017, without restarts);
    `step` multiplies by gamma every so many steps; all rise linearly over the warm-up first.
    """
    schedule, base = recipe.schedule, recipe.optimizer.lr

    def rate(step: int) -> float:
        if step < schedule.warmup_steps:
            return base * (step + 1) / schedule.warmup_steps
        if schedule.name == "cosine":
            span = max(1, total_steps - schedule.warmup_steps)
            return base * (1 + math.cos(math.pi * (step - schedule.warmup_steps) / span)) / 2
        if schedule.name == "step":
            assert schedule.every_steps is not None, "the experiment's schema asks for it"
            return float(base * schedule.gamma ** (step // schedule.every_steps))
        return base

    return rate


def step_seed(seed: int, *, shard_index: int) -> Callable[[int], int]:
    """Step index -> seed of what that share of that step draws, such as dropout masks."""
    return lambda step: step_shard_seed(seed, step=step, shard_index=shard_index)


def step_shard_seed(seed: int, *, step: int, shard_index: int) -> int:
    """The seed of one share of one step, whoever takes it."""
    digest = hashlib.blake2b(f"{seed}/{shard_index}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # torch takes 63 bits
