"""When ranks that train apart meet, with which parameters, and what of it a verification takes."""

from __future__ import annotations

from typing import Any

import pytest

from shardmark.base.numerics import LocalSteps
from shardmark.bench.launch.verification import shortened, steps_of
from tests.distributed.captures import recipe, trial

SIZES = {"a": 10, "b": 10, "c": 30, "d": 5, "e": 5}


@pytest.mark.parametrize(
    ("fragments", "expected"),
    [
        (1, [["a", "b", "c", "d", "e"]]),
        (2, [["a", "b"], ["c", "d", "e"]]),
        (3, [["a", "b"], ["c"], ["d", "e"]]),
    ],
)
def test_fragments_are_neighbours_of_about_one_size(
    fragments: int, expected: list[list[str]]
) -> None:
    assert LocalSteps(period_steps=4, fragments=fragments).assign_fragments(SIZES) == expected


@pytest.mark.parametrize(
    ("period", "fragments", "expected"),
    [
        (3, 1, [[3, 6, 9]]),
        (1, 1, [[1, 2, 3, 4, 5, 6, 7, 8, 9]]),
        (4, 2, [[4, 8], [2, 6]]),
        (3, 3, [[3, 6, 9], [1, 4, 7], [2, 5, 8]]),
    ],
)
def test_each_fragment_meets_once_in_a_round(
    period: int, fragments: int, expected: list[list[int]]
) -> None:
    steps = LocalSteps(period_steps=period, fragments=fragments)
    met = [[t for t in range(10) if steps.is_due(f, t)] for f in range(fragments)]
    assert met == expected


@pytest.mark.parametrize(
    ("name", "options", "period_steps"),
    [
        ("local-sgd", {"period_steps": 100}, 2),
        ("local-sgd", {"period_steps": 1}, 1),
        ("diloco", {"period_steps": 100}, 2),
        ("diloco", {"period_steps": 100, "fragments": 4}, 4),
    ],
)
def test_verification_takes_two_rounds_and_one_step(
    name: str, options: dict[str, Any], period_steps: int
) -> None:
    cell = trial(name, recipe(steps=1000), **options)
    assert cell.built_strategy.numerics(cell.recipe).local_steps is not None
    short = shortened(cell)
    assert short.strategy.options == {**options, "period_steps": period_steps}
    local = short.built_strategy.numerics(short.recipe).local_steps
    assert local is not None
    assert local.period_steps == period_steps
    assert short.recipe.steps == steps_of(cell) == max(3, 2 * period_steps + 1)
