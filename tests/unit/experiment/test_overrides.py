from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmark.config.experiment import Experiment
from shardmark.config.keys import assigned
from shardmark.config.overrides import apply_overrides, parse_override
from shardmark.core.strict_yaml import format_yaml

Make = Callable[..., Experiment]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("recipe.steps", "--set recipe.steps: not key=value; allowed is e.g. recipe.steps=10"),
        ("=1", "--set =1: not key=value"),
        ("recipe..steps=1", "not key=value"),
        ("recipe.steps=[1", "--set recipe.steps, line 1: "),
        ("recipe.stpes=1", "--set recipe.stpes: no such key; nearest: 'recipe.steps'"),
        ("recpie.steps=1", "--set recpie.steps: no such key; nearest: 'recipe.steps'"),
        ("precision=bf16", "--set precision: no such key; allowed is recipe.precision"),
        ("workload.modle=x", "--set workload.modle: no such key; nearest: 'workload.model'"),
        ("recipe.seed.x=1", "--set recipe.seed.x: recipe.seed is 0; it has no keys inside"),
        (
            "matrix.precison=[bf16]",
            "--set matrix.precison: no such axis; nearest: 'recipe.precision'",
        ),
    ],
)
def test_says_what_is_wrong(message: Callable[..., str], setting: str, expected: str) -> None:
    assert expected in message("recipe.seed=0", setting)


def test_drops_the_key_that_the_new_one_excludes(make: Make) -> None:
    recipe = make("recipe.steps=10", "recipe.per_rank_batch=8").recipe
    assert (recipe.steps, recipe.epochs) == (10, None)
    assert (recipe.per_rank_batch, recipe.global_batch) == (8, None)


def test_two_exclusive_overrides_are_a_mistake(message: Callable[..., str]) -> None:
    assert "both are given" in message("recipe.steps=10", "recipe.epochs=3")


def test_null_excludes_nothing(make: Make) -> None:
    assert make("recipe.steps=null").recipe.epochs == 2


def test_the_last_of_equal_keys_holds(make: Make) -> None:
    assert make("recipe.seed=1", "recipe.seed=2").recipe.seed == 2


def test_sets_an_axis_by_its_short_or_full_key(make: Make) -> None:
    experiment = make("matrix.precision=[bf16]", "matrix.recipe.precision=[fp32, bf16]")
    assert experiment.matrix["recipe.precision"] == ["fp32", "bf16"]
    assert "precision" not in experiment.matrix


def test_refuses_to_set_what_an_axis_would_hide(message: Callable[..., str]) -> None:
    said = message("matrix.precision=[bf16]", "recipe.precision=fp32")
    assert "--set recipe.precision: recipe.precision is an axis of the matrix" in said
    assert "set matrix.recipe.precision to a list instead" in said


def test_leaves_the_data_alone() -> None:
    data = {"recipe": {"epochs": 2}}
    apply_overrides(data, [parse_override("recipe.steps=3")])
    assert data == {"recipe": {"epochs": 2}}


_KEY = st.text("abc", min_size=1, max_size=3)


@given(
    path=st.lists(_KEY, min_size=1, max_size=4),
    value=st.none() | st.integers() | st.text(max_size=5) | st.lists(st.floats(allow_nan=False)),
)
def test_an_override_reads_back(path: list[str], value: object) -> None:
    override = parse_override(f"{'.'.join(path)}={format_yaml(value)}")
    assert (list(override.path), override.value) == (path, value)
    found: object = assigned({"a": {"b": 1}}, override.path, override.value)
    for key in path:
        assert isinstance(found, dict)
        found = found[key]
    assert found == value
