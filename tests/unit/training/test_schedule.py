"""Learning rates against numbers computed by hand, and the seeds of steps."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shardmark.train.schedule import learning_rate_of, step_seed
from tests.unit.training.toy import recipe


def rates(total_steps: int, lr: float = 0.8, **schedule: Any) -> list[float]:
    asked = recipe(optimizer={"name": "sgd", "lr": lr}, schedule=schedule)
    rate = learning_rate_of(asked, total_steps)
    return [rate(step) for step in range(total_steps)]


def test_constant() -> None:
    assert rates(3) == [0.8, 0.8, 0.8]


def test_warm_up_rises_linearly_to_the_rate() -> None:
    assert rates(6, warmup_steps=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_cosine_is_half_way_down_in_the_middle() -> None:
    root = math.sqrt(0.5)
    expected = [0.8, 0.4 * (1 + root), 0.4, 0.4 * (1 - root)]
    assert rates(4, name="cosine") == pytest.approx(expected)


def test_cosine_starts_where_its_warm_up_ends() -> None:
    expected = [0.4, 0.8, 0.8, 0.4 * (1 + 0.5), 0.4 * (1 - 0.5)]
    assert rates(5, name="cosine", warmup_steps=2) == pytest.approx(expected)


def test_step_counts_every_step_taken() -> None:
    expected = [0.8, 0.8, 0.8, 0.08, 0.08, 0.08, 0.008]
    assert rates(7, name="step", every_steps=3) == pytest.approx(expected)
    halved = rates(4, name="step", every_steps=2, gamma=0.5, warmup_steps=1)
    assert halved == pytest.approx([0.8, 0.8, 0.4, 0.4])


def test_warm_up_as_long_as_the_training() -> None:
    assert rates(2, name="cosine", warmup_steps=2) == pytest.approx([0.4, 0.8])


def test_step_seeds_differ_by_everything() -> None:
    seeds = {
        step_seed(seed, shard_index=shard)(step)
        for seed in range(3)
        for shard in range(4)
        for step in range(50)
    }
    assert len(seeds) == 3 * 4 * 50
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_step_seeds_are_stable() -> None:
    """A stored run can be repeated by any later version."""
    seed = step_seed(0, shard_index=0)
    assert seed(0) == seed(0) == 759540517790923586
    assert step_seed(2**32 - 1, shard_index=7)(10**6) == 2041553208312166561
