from __future__ import annotations

from collections.abc import Callable

import pytest
from pydantic import ValidationError

from shardmark.config.experiment import Experiment
from shardmark.core.recipe import Optimizer, Recipe, Schedule

Message = Callable[..., str]


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_optimizer_survives_being_written_out(name: str) -> None:
    """All defaults are written, but not the keys that would be refused when read."""
    optimizer = Optimizer.model_validate({"name": name, "lr": 0.1})
    assert Optimizer.model_validate(optimizer.model_dump()) == optimizer
    assert Optimizer.model_validate_json(optimizer.model_dump_json()) == optimizer


def test_written_optimizer_has_only_its_own_keys() -> None:
    assert set(Optimizer(name="adamw").model_dump()) == {
        "name",
        "lr",
        "betas",
        "eps",
        "weight_decay",
    }


def test_schedule_survives_being_written_out() -> None:
    for schedule in (Schedule(), Schedule(name="step", every_steps=10)):
        assert Schedule.model_validate(schedule.model_dump()) == schedule


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("recipe.optimizer={name: adam, momentum: 0.9}", "adam has no momentum; leave it out"),
        (
            "recipe.optimizer={betas: [0.9, 0.999]}",
            "sgd has no betas; leave it out: the keys of sgd",
        ),
        ("recipe.optimizer={name: adam, betas: [0.9, 2]}", "allowed are two numbers from 0"),
        ("recipe.optimizer.nesterov=true", "nesterov needs a momentum above 0 and no dampening"),
        (
            "recipe.optimizer={momentum: 0.9, dampening: 0.1, nesterov: true}",
            "nesterov with momentum 0.9 and dampening 0.1",
        ),
        (
            "recipe.schedule.name=step",
            "recipe.schedule: step without every_steps; give every_steps",
        ),
        ("recipe.schedule.gamma=0.5", "constant has no gamma; only step has"),
        ("recipe.schedule={name: cosine, every_steps: 3}", "cosine has no every_steps"),
        ("recipe.per_rank_batch=0", "found 0; allowed is greater than 0"),
        ("recipe={global_batch: 1}", "neither is given; give exactly one of epochs and steps"),
        ("recipe={epochs: 1}", "exactly one of global_batch and per_rank_batch"),
        ("recipe.epochs=true", "--set recipe.epochs: found true; this key is not a yes or no"),
        ("recipe.epochs=1.5", "found 1.5; allowed is a whole number"),
        ("recipe.optimizer.lr=.inf", "found inf; allowed is a finite number"),
        ("recipe.optimizer.lr=fast", "found 'fast'; allowed is a number"),
        ("recipe.cpu_offload=maybe", "found 'maybe'; allowed is true or false"),
        ("recipe=null", "--set recipe: found null; allowed is a mapping"),
        ("measure.evaluate=ends", "found 'ends'; allowed are epoch, end, never (nearest: 'end')"),
        (
            "limits.trial_seconds=0",
            "--set limits.trial_seconds: found 0; allowed is greater than 0",
        ),
        ("device=gpu", "--set device: found 'gpu'; allowed are auto, cuda, cpu"),
        ("name=../up", "found '../up'; allowed are letters, digits"),
        ("name=.hidden", "a letter or digit first"),
        ("name=3", "found 3; allowed is text"),
        ("workload=3", "--set workload: found 3; allowed is a mapping"),
        ("workload={}", "missing; allowed are toy, needy"),
        (
            "workload.name=tow",
            "--set workload.name: found 'tow'; allowed are toy, needy (nearest: 'toy')",
        ),
        ("workload.name=[]", "--set workload.name: found []; allowed are toy, needy"),
        ("workload.model=smal", "found 'smal'; allowed are small, large (nearest: 'small')"),
        ("workload={name: toy, modle: x}", "modle: no such key; allowed are name, model, data_dir"),
        ("workload.name=needy", "workload.vocabulary: missing; this key is required"),
    ],
)
def test_says_what_is_wrong(message: Message, setting: str, expected: str) -> None:
    assert expected in message(setting)


def test_writes_the_workloads_defaults_out(make: Callable[..., Experiment]) -> None:
    assert make().workload == {"name": "toy", "model": "small", "data_dir": None}


def test_keeps_the_workload_as_given_under_an_axis_about_it(
    make: Callable[..., Experiment],
) -> None:
    experiment = make("matrix.workload.model=[large, small]")
    assert experiment.workload == {"name": "toy", "model": "large"}


def test_is_frozen() -> None:
    recipe = Recipe(global_batch=1, steps=1)
    with pytest.raises(ValidationError, match="frozen"):
        recipe.seed = 1


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (
            "slow_ranks={1: 0.5}",
            "slow_ranks at 1: found 0.5; allowed is greater than or equal to 1",
        ),
        ("slow_ranks={1: 1e4}", "slow_ranks at 1: found 10000.0; allowed is less than or equal to"),
        ("slow_ranks={-1: 2}", "found '-1'; allowed is greater than or equal to 0"),
        ("slow_ranks={first: 2}", "found 'first'; allowed is a whole number"),
        ("slow_ranks=[1]", "slow_ranks: found [1]; allowed is a mapping"),
    ],
)
def test_slow_ranks_are_ranks_and_factors(message: Message, setting: str, expected: str) -> None:
    assert expected in message(setting)


def test_slow_ranks_are_written_with_numbers_and_read_again() -> None:
    base = {
        "name": "test",
        "workload": {"name": "toy"},
        "recipe": {"global_batch": 64, "epochs": 2},
        "matrix": {"strategy": ["both"]},
    }
    experiment = Experiment.model_validate({**base, "slow_ranks": {1: 2, "0": 1.5}})
    assert experiment.slow_ranks == {1: 2.0, 0: 1.5}
    assert Experiment.model_validate_json(experiment.model_dump_json()) == experiment
