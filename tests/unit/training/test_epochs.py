"""How many steps a trial takes, where its epochs end, and which are evaluated."""

from __future__ import annotations

from typing import Any

import pytest

from shardmark.core.recipe import Limits, Measure
from shardmark.train.epochs import Training
from shardmark.trials.trial import StrategySpec, Trial
from shardmark.workloads.base import BatchPlan
from shardmark.workloads.vision.options import ClassificationOptions
from tests.unit.training.toy import ToyWorkload, recipe


def trial(world_size: int = 2, evaluate: Any = "epoch", **changes: Any) -> Trial:
    return Trial(
        id="x",
        experiment="x",
        workload=ClassificationOptions(),
        recipe=recipe(**changes),
        strategy=StrategySpec(name="ddp"),
        world_size=world_size,
        measure=Measure(evaluate=evaluate),
        limits=Limits(),
        device_type="cpu",
    )


def test_epochs_leave_out_an_incomplete_last_batch() -> None:
    training = Training.of(trial(global_batch=10, steps=None, epochs=3), ToyWorkload())
    assert training.steps_per_epoch == 2  # 24 samples
    assert training.epoch_ends == (2, 4, 6)
    assert training.total_steps == 6
    assert training.plan == BatchPlan(global_batch=10, seed=5)


def test_steps_are_one_epoch_whatever_their_number() -> None:
    training = Training.of(trial(global_batch=8, steps=7), ToyWorkload())
    assert (training.steps_per_epoch, training.epoch_ends, training.total_steps) == (3, (7,), 7)


def test_weak_scaling_multiplies_the_batch() -> None:
    asked = trial(world_size=3, global_batch=None, per_rank_batch=4, steps=None, epochs=1)
    training = Training.of(asked, ToyWorkload())
    assert training.plan.global_batch == 12
    assert training.epoch_ends == (2,)


@pytest.mark.parametrize(
    ("evaluate", "expected"),
    [
        ("epoch", (True, True, True)),
        ("end", (False, False, True)),
        ("never", (False, False, False)),
    ],
)
def test_evaluated_epochs(evaluate: str, expected: tuple[bool, ...]) -> None:
    asked = trial(evaluate=evaluate, global_batch=8, steps=None, epochs=3)
    assert Training.of(asked, ToyWorkload()).evaluated == expected
