"""Steps, epochs, learning rates against numbers computed by hand, and the seeds of steps."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch

from shardmark.base.errors import InputError
from shardmark.base.layout import Shard, StepShard
from shardmark.base.recipe import Limits, Measure
from shardmark.ranks.train.schedule import (
    Schedule,
    learning_rate_of,
    seed_step,
    set_numerics,
    step_seed,
)
from shardmark.ranks.trial import StrategySpec, Trial
from shardmark.ranks.workloads.base import BatchPlan
from shardmark.ranks.workloads.vision.options import ClassificationOptions
from tests.unit.ranks.train.toy import ToyWorkload, recipe


def schedule(world_size: int = 2, evaluate: Any = "epoch", **changes: Any) -> Schedule:
    trial = Trial(
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
    return Schedule.for_trial(trial, ToyWorkload())  # 24 samples


@pytest.mark.parametrize(
    ("changes", "batch", "steps_per_epoch", "ends"),
    [
        # An incomplete last batch is left out.
        ({"global_batch": 10, "steps": None, "epochs": 3}, 10, 2, (2, 4, 6)),
        ({"global_batch": 8, "steps": 7}, 8, 3, (7,)),  # one epoch, whatever their number
        ({"global_batch": None, "per_rank_batch": 4, "steps": None, "epochs": 1}, 12, 2, (2,)),
    ],
)
def test_recipe_sets_steps_and_epochs(
    changes: dict[str, Any], batch: int, steps_per_epoch: int, ends: tuple[int, ...]
) -> None:
    made = schedule(world_size=3 if "per_rank_batch" in changes else 2, **changes)
    assert (made.steps_per_epoch, made.epoch_ends) == (steps_per_epoch, ends)
    assert made.total_steps == ends[-1]
    assert made.plan == BatchPlan(global_batch=batch, seed=5)


@pytest.mark.parametrize(
    ("evaluate", "expected"),
    [("epoch", (True,) * 3), ("end", (False, False, True)), ("never", (False,) * 3)],
)
def test_option_selects_evaluated_epochs(evaluate: str, expected: tuple[bool, ...]) -> None:
    assert schedule(evaluate=evaluate, global_batch=8, steps=None, epochs=3).evaluated == expected


ROOT = math.sqrt(0.5)


def own(name: str, **options: Any) -> dict[str, Any]:
    return {"name": "own", "path": f"torch.optim.lr_scheduler:{name}", "options": options}


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, [0.8, 0.8, 0.8]),
        ({"warmup_steps": 4}, [0.2, 0.4, 0.6, 0.8, 0.8, 0.8]),
        ({"name": "cosine"}, [0.8, 0.4 * (1 + ROOT), 0.4, 0.4 * (1 - ROOT)]),
        ({"name": "cosine", "warmup_steps": 2}, [0.4, 0.8, 0.8, 0.4 * 1.5, 0.4 * 0.5]),
        ({"name": "linear"}, [0.8, 0.6, 0.4, 0.2]),
        ({"name": "linear", "warmup_steps": 1, "end_factor": 0.5}, [0.8, 0.8, 0.6]),
        (own("StepLR", step_size=2, gamma=0.5), [0.8, 0.8, 0.4, 0.4, 0.2]),
        (own("CosineAnnealingLR", T_max="steps") | {"warmup_steps": 2}, [0.4, 0.8, 0.8, 0.4]),
        (
            {"name": "step", "every_steps": 2, "gamma": 0.5, "warmup_steps": 1},
            [0.8, 0.8, 0.4, 0.4],
        ),
    ],
)
def test_schedule_sets_learning_rates(settings: dict[str, Any], rates: list[float]) -> None:
    asked = recipe(optimizer={"name": "sgd", "lr": 0.8}, schedule=settings)
    rate = learning_rate_of(asked, len(rates))
    assert [rate(step) for step in range(len(rates))] == pytest.approx(rates)
    assert rate(len(rates) + 5) == rate(len(rates) - 1), "steps that are added keep the last one"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (own("Missing"), "cannot import"),
        (own("ReduceLROnPlateau"), "fails at step 1: .*metrics"),
        (own("OneCycleLR", max_lr=1, total_steps="steps"), "changes momentum"),
        (own("ExponentialLR", gamma=-1.0), "negative"),
    ],
)
def test_schedule_that_needs_more_than_the_step_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        learning_rate_of(recipe(schedule=settings), 4)


def test_step_seeds_differ_by_everything_and_are_stable() -> None:
    def seed_of(seed: int, step: int, index: int) -> int:
        return step_seed(seed, StepShard(step=step, shard=Shard(index=index, count=8)))

    seeds = {seed_of(*all_of) for all_of in product(range(3), range(50), range(4))}
    assert len(seeds) == 3 * 4 * 50
    assert all(0 <= seed < 2**63 for seed in seeds)
    # A stored run can be repeated by any later version.
    assert seed_of(0, 0, 0) == 759540517790923586
    assert seed_of(2**32 - 1, 10**6, 7) == 2041553208312166561


def test_numerics_override_settings_of_imported_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deterministic: list[bool] = []
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", deterministic.append)
    for tf32 in (True, False):  # the last one is the default again
        torch.set_float32_matmul_precision("highest" if tf32 else "high")
        torch.backends.cudnn.allow_tf32 = not tf32
        torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = True
        set_numerics(recipe(tf32=tf32))
        assert torch.backends.cuda.matmul.allow_tf32 is tf32
        assert torch.backends.cudnn.allow_tf32 is tf32
        assert not torch.backends.cudnn.benchmark
        assert not torch.backends.cudnn.deterministic
    assert deterministic == [False, False]


def test_devices_of_a_process_draw_as_separate_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DataParallel's replicas had one mask; the reference plays a share for each device."""
    generators = [torch.Generator() for _ in range(3)]
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(
        torch.cuda, "manual_seed_all", lambda seed: [g.manual_seed(seed) for g in generators]
    )
    whole = StepShard(step=4, shard=Shard(index=0, count=1))
    with torch.random.fork_rng(devices=[]):
        seed_step(7, whole, [torch.device("cuda", index) for index in range(3)])
    parts = [StepShard(step=4, shard=Shard(index=index, count=3)) for index in range(3)]
    assert [g.initial_seed() for g in generators] == [step_seed(7, part) for part in parts]
