"""World size, nodes and ranks on each: any of them follows from the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardmark.config.experiment import Experiment
from shardmark.config.sizes import Misfit, Size, sizes_of
from shardmark.core.errors import InputError
from shardmark.trials.matrix import Plan, expand

Make = Callable[..., Experiment]


@pytest.mark.parametrize(
    ("world_size", "nodes", "each", "expected"),
    [
        (None, None, None, (2, 1)),
        (4, None, None, (4, 1)),
        (4, 2, None, (4, 2)),
        (4, None, 2, (4, 2)),
        (4, None, 4, (4, 1)),
        (4, 2, 2, (4, 2)),
        (None, 2, 3, (6, 2)),
        (None, None, 3, (3, 1)),
        (None, 2, None, (2, 2)),
        (None, 3, None, (3, 3)),
        (1, 2, None, "1 rank cannot be shared out equally to 2 nodes"),
        (4, 3, None, "4 ranks cannot be shared out equally to 3 nodes"),
        (4, 2, 3, "2 nodes with 3 ranks each are not 4 ranks"),
        (2, None, 4, "1 node with 4 ranks each are not 2 ranks"),
        (6, None, 4, "1 node with 4 ranks each are not 6 ranks"),
    ],
)
def test_what_follows(
    world_size: int | None, nodes: int | None, each: int | None, expected: tuple[int, int] | str
) -> None:
    matrix = {} if world_size is None else {"world_size": [world_size]}
    (found,) = sizes_of(matrix, nodes=nodes, ranks_per_node=each)
    if isinstance(expected, str):
        assert isinstance(found, Misfit)
        assert found.reason == expected
    else:
        assert found == Size(world_size=expected[0], nodes=expected[1])


def test_axes_come_before_the_files_own_values_and_no_size_twice() -> None:
    matrix = {"placement.nodes": [1, 2], "placement.ranks_per_node": [1, 2]}
    found = sizes_of(matrix, nodes=7, ranks_per_node=7)
    assert [(size.world_size, getattr(size, "nodes", None)) for size in found] == [
        (1, 1),
        (2, 1),
        (2, 2),
        (4, 2),
    ]
    matrix = {"world_size": [2], "placement.ranks_per_node": [2, 2]}
    same = sizes_of(matrix, nodes=1, ranks_per_node=None)
    assert same == [Size(world_size=2)]


def _cells(plan: Plan) -> set[tuple[str, int, int]]:
    return {(trial.strategy.name, trial.world_size, trial.nodes) for trial in plan.trials}


def test_nodes_are_an_axis_and_a_varied_key(make: Make) -> None:
    """A strategy that runs alone is there once; what does not fit is left out once, with why."""
    plan = expand(make("matrix.nodes=[1, 2, 3]", "matrix.world_size=[4]"), "cpu")
    assert _cells(plan) == {("alone", 1, 1), ("both", 4, 1), ("both", 4, 2)}
    assert [str(cell) for cell in plan.left_out] == [
        "4 ranks: 4 ranks cannot be shared out equally to 3 nodes",
        "alone on 4 ranks: alone is one device",
        "alone on 4 ranks of 2 nodes: alone is one device",
    ]
    assert {trial.varied["placement.nodes"] for trial in plan.trials} == {1, 2}
    assert {"-w4-n2-" in trial.id for trial in plan.trials if trial.nodes == 2} == {True}


def test_fixed_nodes_are_told_where_a_cell_has_others(make: Make) -> None:
    plan = expand(make("placement.nodes=2"), "cpu")
    assert _cells(plan) == {("alone", 1, 1), ("both", 2, 2)}
    assert {trial.varied["placement.nodes"] for trial in plan.trials} == {1, 2}
    (trial,) = expand(make("placement.nodes=2", "matrix.strategy=[both]"), "cpu").trials
    assert trial.varied == {}


@pytest.mark.parametrize(
    ("settings", "reasons"),
    [
        (
            ("placement.ranks_per_node=2", "matrix.world_size=[3, 5]"),
            "3 ranks: 1 node with 2 ranks each are not 3 ranks; "
            "5 ranks: 2 nodes with 2 ranks each are not 5 ranks",
        ),
        (
            ("matrix={strategy: [alone]}", "placement.nodes=65536", "placement.ranks_per_node=2"),
            "131072 ranks: allowed are at most 65536 ranks",
        ),
    ],
)
def test_nothing_runs_where_no_size_fits(
    make: Make, settings: tuple[str, ...], reasons: str
) -> None:
    """Not even a strategy that only runs alone: it was not asked for alone."""
    with pytest.raises(InputError) as caught:
        expand(make(*settings), "cpu")
    said = "test: world_size, placement: no size that is asked for fits"
    assert str(caught.value) == f"{said}; {reasons}"


def test_one_node_changes_no_id(make: Make) -> None:
    """Results of runs from before there were nodes are taken up."""
    one, said = make(), make("placement.nodes=1")
    assert [t.id for t in expand(one, "cpu").trials] == [t.id for t in expand(said, "cpu").trials]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("placement.nodes=0", "--set placement.nodes: found 0; allowed is greater than 0"),
        (
            "placement.nodes=99999999",
            "placement.nodes: found 99999999; allowed is less than or equal to 65536",
        ),
        (
            "matrix.ranks_per_node=[2, 65537]",
            "matrix.placement.ranks_per_node at [1]: found 65537; allowed is less than or equal",
        ),
        ("matrix.nodes=[2, 0]", "--set matrix.placement.nodes at [1]: found 0"),
        ("placement.node=2", "--set placement.node: no such key; nearest: 'placement.nodes'"),
        ("engine=slurp", "--set engine at name: found 'slurp'; allowed are local"),
        ("engine={name: torchrun, node_seconds: 1}", "--set engine at node_seconds: found 1"),
        ("engine.rank=1", "--set engine.rank: no such key"),
    ],
)
def test_mistakes_are_named(make: Make, setting: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        make(setting)
    assert said in str(caught.value)


def test_engine_is_a_name_or_a_mapping(make: Make) -> None:
    assert make().engine == {"name": "local"}
    named: dict[str, Any] = make("engine=torchrun").engine
    assert named["name"] == "torchrun"
    assert named["node_seconds"] == 20.0
    settings = ("engine={name: torchrun, node_rank: 3}", "engine.name=local")
    assert make(*settings).engine == {"name": "local"}, "another engine's options are dropped"
    assert make("engine.name=torchrun", "engine.node_rank=1").engine["node_rank"] == 1
