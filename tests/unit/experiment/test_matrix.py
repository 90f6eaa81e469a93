from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from shardmark.base.cells import cell_id
from shardmark.base.errors import InputError
from shardmark.base.recipe import Measure, Recipe
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.load import from_mapping, load_experiment
from shardmark.experiment.matrix import TrialPlan, expand
from shardmark.ranks.trial import StrategySpec, Trial, trial_id
from shardmark.ranks.workloads.vision.options import ClassificationOptions
from tests import present

Make = Callable[..., Experiment]


def _cells(plan: TrialPlan) -> set[tuple[str, int]]:
    return {(trial.strategy.name, trial.world_size) for trial in plan.trials}


def _refused(experiment: Experiment) -> str:
    with pytest.raises(InputError) as caught:
        expand(experiment)
    return str(caught.value)


def test_impossible_cells_are_left_out_with_a_reason(make: Make) -> None:
    plan = expand(make("matrix.world_size=[1, 2, 4]"))
    assert _cells(plan) == {("single", 1), ("ddp", 2), ("ddp", 4)}
    assert [str(item) for item in plan.left_out] == [
        "single on 2 ranks (it runs on 1 rank): single is one device",
        "single on 4 ranks (it runs on 1 rank): single is one device",
        "ddp on 1 rank (it runs on 2 ranks, 4 ranks): it needs 2 ranks or more",
    ]


def test_two_ranks_are_the_default(make: Make) -> None:
    plan = expand(make("matrix={strategy: [single, ddp]}"))
    assert _cells(plan) == {("single", 1), ("ddp", 2)}
    assert plan.left_out == ()


def test_options_of_strategies_are_axes(make: Make) -> None:
    plan = expand(make("matrix.strategy.bucket_mb=[5, 25]"))
    assert {trial.strategy.options["bucket_mb"] for trial in plan.trials} == {5, 25}
    assert [str(item) for item in plan.left_out] == ["single: single has no option bucket_mb"]
    assert all(trial.varied == {} for trial in plan.trials)


def test_each_repeat_takes_all_cells_in_an_order_of_its_own(make: Make) -> None:
    """More repeats keep the trials there are: a finished run can be repeated more often."""
    settings = ("measure.repeats=3", "matrix.seed=[1, 2, 3, 4, 5]")
    trials = expand(make(*settings)).trials
    assert [trial.repeat for trial in trials] == [0] * 10 + [1] * 10 + [2] * 10
    cells = [(t.strategy.name, t.world_size, json.dumps(t.varied)) for t in trials]
    orders = [cells[start : start + 10] for start in (0, 10, 20)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    few = expand(make(settings[1], "limits.trial_seconds=50")).trials
    assert [trial.id for trial in few] == [trial.id for trial in trials[:10]]


def test_varied_has_the_other_axes_by_full_key(make: Make) -> None:
    settings = (
        "matrix.precision=[bf16]",
        "matrix.lr=[0.1, 0.2]",
        "matrix.workload.model=[resnet50]",
    )
    trials = expand(make(*settings)).trials
    keys = {"recipe.precision", "recipe.optimizer.lr", "workload.model"}
    assert all(set(trial.varied) == keys for trial in trials)
    for trial in trials:
        assert trial.recipe.precision == "bf16"
        assert trial.recipe.optimizer.lr == trial.varied["recipe.optimizer.lr"]
        assert trial.workload.model_dump()["model"] == "resnet50"


def test_whole_mappings_and_measurements_are_axes(make: Make) -> None:
    settings = (
        "matrix.optimizer=[{lr: 0.1, momentum: 0.9}, {name: adamw}]",
        "matrix.measure.probe=[true, false]",
    )
    trials = expand(make(*settings, "matrix.strategy=[ddp]")).trials
    found = Counter((trial.recipe.optimizer.name, trial.measure.probe) for trial in trials)
    assert set(found) == {("sgd", True), ("sgd", False), ("adamw", True), ("adamw", False)}


def test_strategy_entry_overrides_the_recipe(make: Make) -> None:
    trials = expand(make("matrix.strategy=[ddp, {name: ddp, cpu_offload: true}]")).trials
    assert {trial.recipe.cpu_offload for trial in trials} == {True, False}
    for trial in trials:
        assert trial.strategy.options == {}
        assert trial.varied == {"recipe.cpu_offload": trial.recipe.cpu_offload}
    (trial,) = expand(make("matrix.strategy=[{name: ddp, precision: fp32}]")).trials
    assert trial.varied == {}, "it changes nothing"


def test_memory_format_and_implementation_are_axes_where_they_make_sense(make: Make) -> None:
    axes = ("matrix.channels_last=[false, true]", "matrix.implementation=[default, fused]")
    trials = expand(make("matrix.strategy=[ddp]", *axes)).trials
    found = {(t.recipe.channels_last, t.recipe.optimizer.implementation) for t in trials}
    assert found == {(last, how) for last in (False, True) for how in ("default", "fused")}
    said = _refused(load_experiment("detection-quickstart", ["recipe.weights=bf16"]))
    assert "recipe.weights: bf16, and detection computes parts in fp32 alone; fp32" in said
    said = _refused(load_experiment("language-quickstart", ["recipe.channels_last=true"]))
    assert "recipe.channels_last: true, and language has no images; false" in said


def test_the_optimizer_may_be_an_axis_by_name(make: Make) -> None:
    """The base has the defaults of SGD written out, which Adam would refuse."""
    setting = "matrix.recipe.optimizer.name=[sgd, adamw]"
    names = [trial.recipe.optimizer.name for trial in expand(make(setting)).trials]
    assert Counter(names) == {"sgd": 2, "adamw": 2}
    said = _refused(make(setting, "recipe.optimizer.momentum=0.9"))
    assert "recipe.optimizer in the cells with recipe.optimizer.name='adamw'" in said
    assert "adamw has no momentum" in said


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            ("recipe.global_batch=65",),
            "test: recipe.global_batch: 65 samples cannot be shared equally by 2 training ranks "
            "(ddp on 2 ranks); nearest batches that every cell can share: 64 and 66",
        ),
        (
            ("recipe.global_batch=100", "matrix.world_size=[2, 3, 8]"),
            "8 training ranks (ddp on 8 ranks); nearest batches that every cell can share: "
            "96 and 120",
        ),
        (("recipe.global_batch=1",), "nearest batches that every cell can share: 2"),
        (
            ("recipe.global_batch=6", "recipe.gradient_accumulation=2"),
            "6 samples cannot be shared equally by 2 training ranks x 2 micro-batches",
        ),
        (
            ("recipe.per_rank_batch=9", "recipe.gradient_accumulation=2"),
            "recipe.per_rank_batch: 9 samples cannot be shared equally by 2 micro-batches",
        ),
        (
            ("matrix.strategy=[ps-sync]", "matrix.world_size=[3]"),
            "64 samples cannot be shared equally by 3 training ranks (ps-sync on 3 ranks)",
        ),
        (
            ("matrix.strategy=[ddp]", "matrix.world_size=[1]"),
            "test: matrix: no cell makes sense; ddp on 1 rank: it needs 2 ranks or more",
        ),
        (
            ("matrix.strategy=[ddp, {name: ddp, precision: fp32}]",),
            "the cell ddp on 2 ranks is there twice; keep one",
        ),
        (
            ("matrix.slow_ranks=[{1: 2}, {1: 2.0}]",),
            "is there twice; keep one of the values that mean the same",
        ),
        (
            ("matrix.recipe.optimizer.nesterov=[false, true]",),
            "test: recipe.optimizer in the cells with recipe.optimizer.nesterov=true: ",
        ),
        (
            ("slow_ranks={2: 2.0}",),
            "test: slow_ranks: there is no rank 2: the largest world size is 2",
        ),
        (("matrix.slow_ranks=[{}, {2: 2.0}]",), "there is no rank 2"),
        (("matrix.strategy=[ps-sync]", "slow_ranks={2: 2.0}"), "there is no rank 2"),  # a server
        (
            (f"matrix.seed={[*range(6)]}", "measure.repeats=1000"),
            "12,000 trials; allowed are at most 10,000",
        ),
        (
            (f"matrix.seed={[*range(5)]}", "matrix.world_size=[65536]"),
            "ranks in all cells; allowed are at most 262,144",
        ),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(
    make: Make, settings: tuple[str, ...], expected: str
) -> None:
    assert expected in _refused(make(*settings))


def test_servers_come_on_top_of_the_world_size(make: Make) -> None:
    settings = ("matrix.strategy=[ps-sync]", "matrix.world_size=[4]", "recipe.per_rank_batch=8")
    (trial,) = expand(make(*settings)).trials
    assert (trial.world_size, trial.batch_per_step) == (4, 32)


def test_slow_ranks_are_of_the_file_or_an_axis(make: Make) -> None:
    trials = expand(make("slow_ranks={1: 2, 0: 1.5}")).trials
    assert [(trial.slow_ranks, trial.varied) for trial in trials] == [({1: 2.0, 0: 1.5}, {})] * 2
    trials = expand(make("matrix.slow_ranks=[{}, {1: 2.0}]")).trials
    found = {(trial.strategy.name, tuple(trial.slow_ranks.items())) for trial in trials}
    assert found == {(name, slow) for name in ("single", "ddp") for slow in ((), ((1, 2.0),))}
    assert all(set(trial.varied) == {"slow_ranks"} for trial in trials)
    assert expand(make("slow_ranks={2: 2.0}", "matrix.world_size=[2, 4]")).trials


def test_without_slow_ranks_trials_keep_their_names(make: Make) -> None:
    """The names are those of versions without slow ranks: finished runs can be resumed."""
    before = {trial.id for trial in expand(make()).trials}
    assert {trial.id for trial in expand(make("slow_ranks={}")).trials} == before
    both = expand(make("matrix.slow_ranks=[{}, {1: 2.0}]")).trials
    assert {trial.id for trial in both if not trial.slow_ranks} == before
    assert not before & {trial.id for trial in both if trial.slow_ranks}
    assert not before & {trial.id for trial in expand(make("slow_ranks={1: 2}")).trials}


def test_a_trial_has_time_for_its_warm_up_and_windows(make: Make) -> None:
    said = _refused(make("measure.window_seconds=30", "limits.trial_seconds=30"))
    assert "limits.trial_seconds: 30 s" in said
    assert expand(make("limits.trial_seconds=20"), "cpu").trials
    with pytest.raises(InputError, match="take 20 s"):
        expand(make("limits.trial_seconds=20"), "cuda")


def test_a_trial_reads_back_from_json(make: Make) -> None:
    settings = ("matrix.lr=[0.1]", "workload.data_dir=/data", "slow_ranks={1: 2}")
    for trial in expand(make(*settings), "cuda").trials:
        assert Trial.model_validate_json(trial.model_dump_json()) == trial
        assert trial.device_type == "cuda"


def test_trial_ids_are_equal_only_for_equal_content(make: Make) -> None:
    (trial,) = expand(make("matrix.strategy=[ddp]")).trials
    for same in ({"id": "x"}, {"experiment": "x"}, {"varied": {"a": 1}}):
        assert trial_id(trial.model_copy(update=same)) == trial.id
    others: list[dict[str, Any]] = [
        {"workload": ClassificationOptions(dataset="random")},
        {"recipe": Recipe(global_batch=64, steps=2)},
        {"strategy": StrategySpec(name="fsdp")},
        {"strategy": StrategySpec(name="ddp", options={"bucket_mb": 1})},
        {"world_size": 3},
        {"nodes": 2},
        {"measure": Measure(warmup_steps=1)},
        {"slow_ranks": {1: 2.0}},
        {"device_type": "cuda"},
        {"repeat": 1},
    ]
    ids = {trial_id(trial.model_copy(update=other)) for other in others}
    assert len(ids - {trial.id}) == len(others)
    assert trial.id.startswith("ddp-w2-fp32-r0-")
    placed = expand(make("matrix.strategy=[ddp]")).on("cuda").trials[0]
    assert (placed.device_type, placed.id) == ("cuda", trial_id(placed))


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, unique=True),
    seeds=st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True),
    repeats=st.integers(1, 3),
)
def test_ids_of_a_plan_are_unique(
    make: Make, sizes: list[int], seeds: list[int], repeats: int
) -> None:
    experiment = make(
        f"matrix.world_size={sizes}", f"matrix.seed={seeds}", f"measure.repeats={repeats}"
    )
    trials = expand(experiment).trials
    assert len({trial.id for trial in trials}) == len(trials)
    repeated = Counter(trial.repeat for trial in trials)
    assert repeated == dict.fromkeys(range(repeats), len(trials) // repeats)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((None, None, None), (2, 1)),
        ((4, None, None), (4, 1)),
        ((4, 2, None), (4, 2)),
        ((4, None, 2), (4, 2)),
        ((4, 2, 2), (4, 2)),
        ((None, 2, 3), (6, 2)),
        ((None, None, 3), (3, 1)),
        ((None, 2, None), (2, 2)),
        ((None, 3, None), (3, 3)),
        ((1, 2, None), "1 rank: 1 rank cannot be shared out equally to 2 nodes"),
        ((4, 3, None), "4 ranks: 4 ranks cannot be shared out equally to 3 nodes"),
        ((4, 2, 3), "4 ranks: 2 nodes with 3 ranks each are not 4 ranks"),
        ((2, None, 4), "2 ranks: 1 node with 4 ranks each are not 2 ranks"),
        ((None, 65536, 2), "131072 ranks: allowed are at most 65536 ranks"),
    ],
)
def test_world_size_nodes_and_ranks_on_each_follow_from_each_other(
    make: Make, asked: tuple[int | None, ...], expected: tuple[int, int] | str
) -> None:
    """Nothing runs where no size fits, not even a strategy that only runs alone."""
    world_size, nodes, each = asked
    sizes = "" if world_size is None else f", world_size: [{world_size}]"
    experiment = make(
        f"matrix={{strategy: [ddp]{sizes}}}",
        "recipe={per_rank_batch: 4, steps: 2}",
        f"placement.nodes={nodes or 'null'}",
        f"placement.ranks_per_node={each or 'null'}",
    )
    if isinstance(expected, str):
        assert f"no size that is asked for fits; {expected}" in _refused(experiment)
    else:
        (trial,) = expand(experiment).trials
        assert (trial.world_size, trial.nodes) == expected
        assert trial.varied == {}


def test_nodes_are_an_axis_and_a_varied_key(make: Make) -> None:
    """A strategy that runs alone is there once; what does not fit is left out once, with why."""
    plan = expand(make("matrix.nodes=[1, 2, 3]", "matrix.world_size=[4]"))
    cells = {(trial.strategy.name, trial.world_size, trial.nodes) for trial in plan.trials}
    assert cells == {("single", 1, 1), ("ddp", 4, 1), ("ddp", 4, 2)}
    assert [str(cell) for cell in plan.left_out] == [
        "4 ranks: 4 ranks cannot be shared out equally to 3 nodes",
        "single on 4 ranks (it runs on 1 rank): single is one device",
        "single on 4 ranks of 2 nodes (it runs on 1 rank): single is one device",
    ]
    assert {trial.varied["placement.nodes"] for trial in plan.trials} == {1, 2}
    assert {"-w4-n2-" in trial.id for trial in plan.trials if trial.nodes == 2} == {True}

    fixed = expand(make("placement.nodes=2")).trials
    assert {trial.varied["placement.nodes"] for trial in fixed} == {1, 2}, "one runs alone"


def test_axes_replace_the_values_of_the_file(make: Make) -> None:
    matrix = {"strategy": ["ddp"], "nodes": [1, 2], "ranks_per_node": [1, 2]}
    data = make(f"matrix={json.dumps(matrix)}").model_dump(mode="json")
    plan = expand(from_mapping({**data, "placement": {"nodes": 7, "ranks_per_node": 7}}))
    assert {(t.world_size, t.nodes) for t in plan.trials} == {(2, 1), (2, 2), (4, 2)}
    assert [cell.world_size for cell in plan.left_out] == [1]


def test_values_of_the_workload_are_checked_in_their_cells(make: Make) -> None:
    said = _refused(make("matrix.workload.model=[resnet18, resnet19]"))
    assert "test: matrix.workload.model: unknown model 'resnet19'" in said
    tasks = expand(make("matrix.workload.name=[classification, detection]")).trials
    assert {trial.workload.name for trial in tasks} == {"classification", "detection"}


def test_all_cells_have_the_threads_of_the_largest_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    matrix = {"strategy": ["single", "ddp"], "world_size": [2, 4]}
    trials = expand(make(f"matrix={json.dumps(matrix)}", "measure.repeats=1")).trials
    assert {trial.world_size: trial.threads_of(trial.world_size) for trial in trials} == {
        1: 2, 2: 2, 4: 2,
    }  # fmt: skip
    fixed = expand(make(f"matrix={json.dumps(matrix)}", "recipe.threads_per_rank=3")).trials
    assert {trial.threads_of(trial.world_size) for trial in fixed} == {3}
    (alone,) = expand(make("matrix.strategy=[single]", "measure.repeats=1")).trials
    assert alone.threads_of(1) == 8
    assert alone.id not in {trial.id for trial in trials}


def test_the_baseline_has_a_twin_where_a_quality_is_compared(make: Make) -> None:
    plan = expand(make("matrix.strategy=[ddp,single,fsdp]", "measure.repeats=2"))
    twin = present(plan.twin)
    (cell,) = [t for t in plan.trials if t.strategy.name == "single" and t.repeat == 0]
    assert twin.title == "twin of single on 1 rank"
    assert twin.id.startswith("single-w1-fp32-twin-")
    assert cell_id(twin.model_dump(mode="json")) == cell_id(cell.model_dump(mode="json"))
    assert [trial.repeat for trial in plan.with_twin] == [0] * 4 + [1] * 3
    assert plan.with_twin[3] is twin
    moved = present(plan.on("cuda").twin)
    assert moved.device_type == "cuda"
    first = present(expand(make("matrix.strategy=[fsdp,ddp]")).twin)
    assert first.strategy.name == "fsdp"


@pytest.mark.parametrize(
    "changes",
    [
        ("measure.twin=false",),
        ("measure.verify=false",),
        ("measure.evaluate=never",),
        ("matrix.strategy=[ddp]", "matrix.recipe.precision=[fp32,bf16]"),
    ],
)
def test_nothing_to_compare_needs_no_twin(make: Make, changes: tuple[str, ...]) -> None:
    assert expand(make("matrix.strategy=[single,ddp]", *changes)).twin is None


def test_a_trial_keeps_its_name_with_or_without_twins(make: Make) -> None:
    plans = (expand(make(f"measure.twin={on}")) for on in ("true", "false"))
    first, second = ([trial.id for trial in plan.trials] for plan in plans)
    assert first == second
