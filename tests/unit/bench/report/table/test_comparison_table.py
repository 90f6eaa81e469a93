"""The comparison's columns, and what a reader must know beside the numbers."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.errors import InputError
from shardmark.base.metrics import METRICS
from shardmark.base.results.schema import Outcome, TrialResult
from shardmark.base.results.store import StoredRun
from shardmark.base.table.formats import Format, render_tables
from shardmark.base.text import render_json
from shardmark.bench.analysis.compare.comparison import Comparison, compare
from shardmark.bench.report.table.comparison import WIDE, comparison_json, comparison_table
from shardmark.bench.report.views.registry import find_view
from tests.golden.invented import compare_trials, invented_rank, invented_trial


def single_and_ddp(repeats: Sequence[int] = (0, 1), **fields: Any) -> list[TrialResult]:
    return [
        invented_trial(strategy, size, repeat, **fields)
        for strategy, size in (("single", 1), ("ddp", 2))
        for repeat in repeats
    ]


def shown(*trials: TrialResult, columns: Sequence[str] = WIDE) -> dict[str, tuple[str, ...]]:
    """Title with unit -> cells, as people see them."""
    made, rows = comparison_table(compare_trials(*trials), columns).for_people()
    titles = [f"{column.title} {column.unit}".strip() for column in made]
    return dict(zip(titles, zip(*rows, strict=True), strict=True)) if rows else {}


def document(comparison: Comparison) -> Any:
    return json.loads(render_json(comparison_json(comparison)))


def test_table_has_few_columns_and_the_fastest_row_first() -> None:
    few = comparison_table(compare_trials(*single_and_ddp()))
    columns, rows = few.for_people()
    assert [column.key for column in columns] == [
        *("label", "ranks", "samples_per_second", "speedup", "peak_memory_bytes", "accuracy_top1")
    ]
    assert rows == [
        ["ddp", "2", "735 ±98", "1.83", "291", "95.3"],
        ["single", "1", "402 ±26", "1.00", "410", "95.3"],
    ]
    table = render_tables([few], headings=False).partition("\n\n")[0]
    assert max(map(len, table.splitlines())) <= 80


def test_an_axis_of_one_value_has_no_column_and_is_in_no_name() -> None:
    varied = {"workload.model": "resnet18", "recipe.global_batch": 64}
    trials = single_and_ddp(varied=varied)
    comparison = compare_trials(*trials)
    assert "model" not in shown(*trials)
    assert comparison.rows[0].place == "single on 1 rank"
    assert document(comparison)["rows"][0]["recipe.global_batch"] == 64, "programs have it"
    trials.append(invented_trial(varied=varied | {"recipe.global_batch": 128}))
    assert sorted(shown(*trials)["global_batch"]) == ["128", "64", "64"]
    assert "model" not in shown(*trials)


def test_a_run_with_one_model_names_it_beside_a_run_with_several(tmp_path: Path) -> None:
    def run(name: str, *trials: TrialResult) -> StoredRun:
        return StoredRun(path=tmp_path / name, trials=trials)

    models = ("resnet50", "vit_cifar")
    several = [invented_trial(varied={"workload.model": model}) for model in models]
    comparison = compare([run("one", invented_trial()), run("several", *several)])
    table = comparison_table(comparison)
    assert sorted(table.cells("workload.model")) == ["resnet18", "resnet50", "vit_cifar"]


def test_more_columns_have_human_units() -> None:
    cells = shown(*single_and_ddp())
    assert cells["step ms"] == ("87.1", "159")
    assert cells["verdict"] == ("faster", "baseline")
    assert cells["speed-up"] == ("1.83 (1.72 to 1.95)", "1.00")
    assert cells["eff. %"] == ("91", "100")
    assert cells["state MiB"] == ("171", "171")
    assert "outcomes" not in cells


def test_columns_are_chosen_by_name() -> None:
    own = invented_trial()
    own = own.model_copy(update={"metrics": own.metrics | {"dice": own.metrics["threads"]}})
    names = ["step_seconds", "verdict", "dice"]
    assert list(shown(own, columns=names)) == ["strategy", "ranks", "step ms", "dice"]
    assert "dice" in shown(own)
    with pytest.raises(InputError, match="no column 'step_second'; did you mean 'step_seconds'"):
        comparison_table(compare_trials(own), ["step_second"])


def test_every_axis_that_varies_names_the_row() -> None:
    varied = [
        {"recipe.global_batch": 64, "recipe.optimizer.name": "sgd", "workload.name": "a"},
        {"recipe.global_batch": 256, "recipe.optimizer.name": "adam", "workload.name": "b"},
    ]
    trials = [
        invented_trial(varied=keys | {"recipe.precision": precision}, precision=precision)
        for keys, precision in zip(varied, ("bf16", "fp32"), strict=True)
    ]
    cells = shown(*trials)
    assert cells["global_batch"] == ("64", "256")
    assert cells["recipe.optimizer.name"] == ("sgd", "adam")
    assert cells["workload.name"] == ("a", "b")
    assert cells["precision"] == ("bf16", "fp32")
    assert (
        compare_trials(*trials)
        .rows[0]
        .place.startswith("ddp on 2 ranks, bf16, recipe.global_batch")
    )


def test_several_runs_and_workloads_have_columns() -> None:
    other = {"experiment": "second", "workload": {"name": "detection", "dataset": "coco"}}
    second = invented_trial("fsdp", 2).model_copy(update={"trial": other})
    runs = [
        StoredRun(path=Path(name), trials=(trial,))
        for name, trial in (("a", invented_trial()), ("b", second))
    ]
    table = comparison_table(compare(runs))
    assert set(table.values("experiment")) == {"invented", "second"}
    assert table.cells("workload")[1] == "detection coco"


def test_servers_are_counted_beside_the_workers() -> None:
    trial = invented_trial("ps-async", 2, 0)
    first, second = trial.ranks
    server = first.model_copy(update={"rank": 2, "role": "server"})
    cells = shown(trial.model_copy(update={"ranks": (first, second, server)}))
    assert cells["ranks"] == ("2+1",)
    assert "worker MiB" in cells
    assert "worker MiB" not in shown(invented_trial())


def test_json_has_the_documented_keys() -> None:
    varied = {"recipe.global_batch": 64}
    failed = invented_trial("fsdp", outcome=Outcome.FAILED, varied=varied)
    _, ddp, fsdp = document(compare_trials(*single_and_ddp(varied=varied), failed))["rows"]
    assert (ddp["strategy"], ddp["world_size"], ddp["precision"]) == ("ddp", 2, "fp32")
    assert ddp["recipe.global_batch"] == 64
    assert (ddp["outcomes"], ddp["verdict"]) == ({"ok": 2}, "faster")
    assert set(ddp["metrics"]) == set(METRICS)
    assert set(ddp["metrics"]["step_seconds"]) == {"value", "low", "high", "unit", "n"}
    assert ddp["metrics"]["step_seconds"]["unit"] == "seconds"
    assert ddp["metrics"]["mfu"] is None
    assert ddp["metrics"]["speedup"]["value"] == pytest.approx(2 / 1.1 * math.sqrt(1.02 / 1.01))
    assert set(fsdp["metrics"].values()) == {None}
    assert fsdp["outcomes"] == {"failed": 1}


def test_csv_has_every_metric_with_its_interval() -> None:
    trials = [
        *single_and_ddp(varied={"recipe.optimizer": {"name": "sgd"}}),
        invented_trial("fsdp", outcome=Outcome.FAILED, strategy_options={"wrap": "block"}),
    ]
    text = render_tables([comparison_table(compare_trials(*trials))], Format.CSV)
    by_strategy = {line["strategy"]: line for line in csv.DictReader(io.StringIO(text))}
    ddp, fsdp = by_strategy["ddp"], by_strategy["fsdp"]
    for name in METRICS:
        assert {name, f"{name}_low", f"{name}_high"} <= set(ddp)
    low, value, high = (float(ddp[f"samples_per_second{end}"]) for end in ("_low", "", "_high"))
    assert low < value < high
    assert json.loads(ddp["recipe.optimizer"]) == {"name": "sgd"}
    assert ddp["mfu"] == fsdp["samples_per_second"] == fsdp["recipe.optimizer"] == ""
    assert json.loads(fsdp["strategy_options"]) == {"wrap": "block"}


def test_synthetic_data_and_weak_scaling_have_notes() -> None:
    trial = invented_trial(synthetic=True)
    trial = trial.model_copy(update={"trial": {"recipe": {"per_rank_batch": 32}}})
    notes = " ".join(comparison_table(compare_trials(trial)).notes)
    assert "Synthetic data" in notes
    assert "Weak scaling" in notes
    (row,) = document(compare_trials(trial))["rows"]
    assert row["synthetic"] is row["weak_scaling"] is True
    assert "top-1 %" not in shown(trial)


@pytest.mark.parametrize(
    ("other", "batch_norms", "told"),
    [(("single", 1), 20, True), (("fsdp", 2), 20, False), (("single", 1), 0, False)],
)
def test_batch_norm_is_named_where_shares_differ(
    *, other: tuple[str, int], batch_norms: int, told: bool
) -> None:
    rank = invented_rank(0)
    assert rank.probe is not None
    probe = rank.probe.model_copy(update={"batch_norms": batch_norms})
    measured = (rank.model_copy(update={"probe": probe}),)
    trials = [invented_trial(*cell, ranks=measured) for cell in (("ddp", 2), other)]
    notes = " ".join(comparison_table(compare_trials(*trials)).notes)
    assert ("Batch norm" in notes) == told


def test_an_empty_run_says_so() -> None:
    comparison = compare([StoredRun(path=Path("run"), trials=(), missing=("y",))])
    text = render_tables([comparison_table(comparison)])
    assert text == "No trial has a result.\nBegun without a result: 1 trial.\n"
    assert document(comparison) == {"rows": [], "warnings": []}


def test_every_measured_metric_has_a_line() -> None:
    trials = [
        invented_trial(strategy, 2, metrics={"samples_per_second": rate, "mfu": None})
        for strategy, rate in (("ddp", 500.0), ("fsdp", 250.0))
    ]
    comparison = compare_trials(*trials)
    view, value = find_view("metrics")
    (table,) = view.tables(comparison, value)
    titles = [column.title for column in table.columns]
    assert titles == ["metric", "unit", "ddp on 2 ranks", "fsdp on 2 ranks"]
    lines = dict(zip(table.values("metric"), table.rows, strict=True))
    assert lines["samples_per_second"][2:] == ("500", "250")
    measured = {name for row in comparison.rows for name, v in row.metrics.items() if v}
    assert lines.keys() == measured
    assert "mfu" in table.notes[-1]
    assert lines["peak_memory_bytes"][1] in ("KiB", "MiB", "GiB")
