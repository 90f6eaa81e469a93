"""Every format tells the same, with what a reader must know beside the numbers."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.golden.invented import invented_trial

from shardmark.analysis.compare.comparison import Comparison, compare
from shardmark.core.metrics import METRICS
from shardmark.report.table.data import render_csv, render_json
from shardmark.report.table.markdown import render_markdown
from shardmark.report.table.tables import Table, comparison_table, number
from shardmark.report.table.text import render_text
from shardmark.report.views.epochs import variants
from shardmark.results.schema import Failure, Outcome, TrialResult
from shardmark.results.store import StoredRun


def compared(*trials: TrialResult, **stored: Any) -> Comparison:
    return compare([StoredRun(path=Path("run"), trials=trials, **stored)])


def single_and_ddp(repeats: Sequence[int] = (0, 1), **fields: Any) -> list[TrialResult]:
    return [
        invented_trial(strategy, size, repeat, **fields)
        for strategy, size in (("single", 1), ("ddp", 2))
        for repeat in repeats
    ]


def cells(table: Table, title: str) -> tuple[str, ...]:
    """Of the column with that title, in which a blank stands for the line break."""
    titles = {column.title.replace("\n", " "): column.cells for column in table.columns}
    return titles[title]


def notes(*trials: TrialResult, **stored: Any) -> tuple[str, ...]:
    return comparison_table(compared(*trials, **stored)).notes


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.012345, "0.01235"),
        (1.23456, "1.235"),
        (-12.3456, "-12.35"),
        (123.456, "123.5"),
        (123456.7, "123457"),
    ],
)
def test_numbers_have_about_four_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_columns_have_human_units() -> None:
    table = comparison_table(compared(*single_and_ddp()))
    assert [column.title.replace("\n", " ") for column in table.columns] == [
        "strategy",
        "ranks",
        "samples/s",
        "step ms",
        "speedup",
        "verdict",
        "eff. %",
        "peak MiB",
        "peak ratio",
        "state MiB",
        "top-1 %",
        "val. loss",
        "outcome",
    ]
    assert cells(table, "samples/s") == ("402.0 ±26.2", "734.5 ±98.5")
    assert cells(table, "step ms") == ("159.2", "87.14")
    assert cells(table, "speedup") == ("1.00", "1.83 (1.72 to 1.95)")
    assert cells(table, "verdict") == ("baseline", "faster")
    assert cells(table, "eff. %") == ("100", "91")
    assert cells(table, "peak MiB") == ("410.1", "290.9")
    assert cells(table, "state MiB") == ("170.5", "170.5")
    assert cells(table, "top-1 %") == ("95.3", "95.3")
    assert cells(table, "outcome") == ("2 ok", "2 ok")


def test_average_precision_is_shown_where_it_is_measured() -> None:
    found = {"map": 0.36949, "map_50": 0.58, "accuracy_top1": None, "validation_loss": None}
    table = comparison_table(compared(invented_trial(metrics=found)))
    assert cells(table, "mAP") == ("0.369",)
    assert cells(table, "mAP@50") == ("0.580",)
    assert not {"top-1\n%", "val.\nloss"} & {column.title for column in table.columns}
    document = json.loads(render_json(compared(invented_trial(metrics=found))))
    assert document["rows"][0]["metrics"]["map_50"]["unit"] == "fraction"


def test_memory_is_in_the_unit_of_the_largest() -> None:
    trial = invented_trial(metrics={"peak_memory_bytes": 2048.0, "parameter_bytes": 5 * 2.0**30})
    table = comparison_table(compared(trial))
    assert cells(table, "peak KiB") == ("2.000",)
    assert cells(table, "state GiB") == ("5.125",)


def test_state_is_missing_if_a_part_is() -> None:
    table = comparison_table(compared(invented_trial(metrics={"gradient_bytes": None})))
    assert not any(column.title.startswith("state") for column in table.columns)


def test_training_loss_stands_in_for_the_validations() -> None:
    trial = invented_trial(metrics={"validation_loss": None, "train_loss": 2.3})
    assert cells(comparison_table(compared(trial)), "train loss") == ("2.3000",)


def test_varied_keys_are_columns_with_short_names() -> None:
    varied = [
        {"recipe.global_batch": 64, "recipe.optimizer.name": "sgd", "workload.name": "a"},
        {"recipe.global_batch": 256, "recipe.optimizer.name": "adam", "workload.name": "b"},
    ]
    trials = [
        invented_trial(varied=keys, precision=precision)
        for keys, precision in zip(varied, ("bf16", "fp32"), strict=True)
    ]
    table = comparison_table(compared(*trials))
    assert cells(table, "global_batch") == ("64", "256")
    assert cells(table, "recipe.optimizer.name") == ("sgd", "adam")
    assert cells(table, "workload.name") == ("a", "b")
    assert cells(table, "precision") == ("bf16", "fp32")


def test_several_runs_and_workloads_are_told_apart() -> None:
    other = invented_trial()
    workload = {"experiment": "second", "workload": {"name": "detection", "dataset": "coco"}}
    other = other.model_copy(update={"trial": workload})
    runs = [StoredRun(path=Path("run"), trials=(trial,)) for trial in (invented_trial(), other)]
    table = comparison_table(compare(runs))
    assert cells(table, "experiment") == ("invented", "second")
    assert cells(table, "workload") == ("classification resnet18 digits", "detection coco")


def test_text_fits_a_hundred_columns() -> None:
    trials = [
        *single_and_ddp((0, 1, 2)),
        *(invented_trial("fsdp-grad-op", 4, repeat) for repeat in (0, 1, 2)),
        invented_trial(
            "zero-3",
            4,
            outcome=Outcome.FAILED,
            failure=Failure(reason="rank 3 raised ValueError: " + "long " * 30, remedy="mend it"),
        ),
    ]
    text = render_text(comparison_table(compared(*trials)), 100)
    assert max(map(len, text.splitlines())) <= 100
    assert text.endswith("\n")
    parts = text.split("\n\n")[:2]
    title, unit, rule, *rows = parts[0].splitlines()
    assert title.split()[:3] == ["strategy", "ranks", "samples/s"]
    assert unit.split() + parts[1].splitlines()[1].split() == [
        *("ms", "%", "MiB", "ratio", "MiB", "%", "loss")
    ]
    assert set(rule) == {"-", " "}
    assert [row.split()[0] for row in rows] == ["single", "ddp", "fsdp-grad-op", "zero-3"]
    assert parts[1].endswith("1 failed")


def test_markdown_is_a_table_and_a_list() -> None:
    failure = Failure(reason="a | b\n<c>")
    comparison = compared(
        *single_and_ddp(), invented_trial("fsdp", failure=failure, outcome=Outcome.FAILED)
    )
    table, listed = render_markdown(comparison_table(comparison)).split("\n\n")
    lines = table.splitlines()
    assert lines[0].startswith("| strategy | ranks | samples/s | step ms | speedup |")
    assert lines[1].startswith("| :--- | ---: | ---: |")
    assert lines[3].startswith("| ddp | 2 | 734.5 ±98.5 | 87.14 | 1.83 (1.72 to 1.95) | faster |")
    assert len({line.count("|") for line in lines}) == 1
    assert listed.startswith("- fsdp on 2 ranks: 1 x failed: a \\| b &lt;c>\n")


def test_json_is_the_contracts() -> None:
    comparison = compared(
        *single_and_ddp(varied={"recipe.global_batch": 64}),
        invented_trial("fsdp", outcome=Outcome.FAILED, varied={"recipe.global_batch": 64}),
    )
    document = json.loads(
        render_json(comparison), parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
    )
    assert set(document) == {"rows", "warnings"}
    _, ddp, fsdp = document["rows"]
    assert (ddp["strategy"], ddp["world_size"], ddp["precision"]) == ("ddp", 2, "fp32")
    assert ddp["recipe.global_batch"] == 64
    assert ddp["outcomes"] == {"ok": 2}
    assert ddp["verdict"] == "faster"
    assert set(ddp["metrics"]) == set(METRICS)
    assert set(ddp["metrics"]["step_seconds"]) == {"value", "low", "high", "unit", "n"}
    assert ddp["metrics"]["step_seconds"]["unit"] == "seconds"
    assert ddp["metrics"]["mfu"] is None
    assert ddp["metrics"]["speedup"]["value"] == pytest.approx(2 / 1.1 * math.sqrt(1.02 / 1.01))
    assert set(fsdp["metrics"].values()) == {None}
    assert fsdp["outcomes"] == {"failed": 1}


def test_json_of_one_repeat_has_no_interval() -> None:
    document = json.loads(render_json(compared(invented_trial())))
    assert document["rows"][0]["metrics"]["threads"] == {
        "value": 1.0,
        "low": None,
        "high": None,
        "unit": "threads",
        "n": 1,
    }


def test_json_refuses_what_is_no_json() -> None:
    comparison = compared(invented_trial(varied={"recipe.optimizer.lr": math.inf}))
    with pytest.raises(ValueError, match="Out of range float values"):
        render_json(comparison)


def test_csv_has_every_metric_with_its_interval() -> None:
    trials = [
        *single_and_ddp(varied={"recipe.optimizer": {"name": "sgd"}}),
        invented_trial("fsdp", outcome=Outcome.FAILED, strategy_options={"wrap": "block"}),
    ]
    lines = list(csv.DictReader(io.StringIO(render_csv(compared(*trials)))))
    assert len(lines) == 3
    for name in METRICS:
        assert {name, f"{name}_low", f"{name}_high"} <= set(lines[0])
    ddp = next(line for line in lines if line["strategy"] == "ddp")
    low, value, high = (
        float(ddp[f"samples_per_second{suffix}"]) for suffix in ("_low", "", "_high")
    )
    assert low < value < high
    assert ddp["mfu"] == ddp["mfu_low"] == ""
    assert json.loads(ddp["recipe.optimizer"]) == {"name": "sgd"}
    fsdp = next(line for line in lines if line["strategy"] == "fsdp")
    assert fsdp["samples_per_second"] == fsdp["recipe.optimizer"] == ""
    assert json.loads(fsdp["strategy_options"]) == {"wrap": "block"}


def test_synthetic_and_weak_scaling_are_labelled_in_every_format() -> None:
    trial = invented_trial(synthetic=True)
    trial = trial.model_copy(update={"trial": {"recipe": {"per_rank_batch": 32}}})
    comparison = compared(trial)
    table = comparison_table(comparison)
    assert cells(table, "label") == ("synthetic, weak scaling",)
    for text in (render_text(table), render_markdown(table)):
        assert "synthetic, weak scaling" in text
        assert "Synthetic data: speed and memory count, accuracy and loss mean nothing." in text
        assert "Weak scaling: each rank keeps its batch" in text
    row = json.loads(render_json(comparison))["rows"][0]
    assert row["synthetic"] is row["weak_scaling"] is True
    (line,) = csv.DictReader(io.StringIO(render_csv(comparison)))
    assert line["synthetic"] == line["weak_scaling"] == "true"


def rated(rates: dict[str, tuple[float, ...]], **fields: Any) -> list[TrialResult]:
    return [
        invented_trial(strategy, 1, repeat, metrics={"samples_per_second": rate}, **fields)
        for strategy, series in rates.items()
        for repeat, rate in enumerate(series)
    ]


def test_each_row_has_its_verdict_and_one_note_their_number() -> None:
    trials = rated(
        {
            "single": (100.0, 101.0, 100.5),
            "ddp": (150.0, 151.0, 151.5),
            "fsdp": (50.0, 50.1, 50.3),
            "zero-1": (90.0, 120.0, 95.0),
        }
    )
    table = comparison_table(compared(*trials))
    assert cells(table, "verdict") == ("baseline", "faster", "slower", "no difference shown")
    assert any(note.startswith("3 comparisons with the baseline; 5 %") for note in table.notes)


def test_one_repeat_has_neither_verdict_nor_interval() -> None:
    table = comparison_table(compared(*single_and_ddp([0])))
    assert cells(table, "speedup") == ("1.00", "1.82")
    assert cells(table, "verdict") == ("baseline", "")
    assert not any(note.startswith("1 comparison") for note in table.notes)


def test_empty_run_says_so_in_every_format() -> None:
    comparison = compared(missing=("y",))
    table = comparison_table(comparison)
    assert render_text(table) == "No trial has a result.\nBegun without a result: y.\n"
    assert render_markdown(table) == "- No trial has a result.\n- Begun without a result: y.\n"
    assert json.loads(render_json(comparison)) == {"rows": [], "warnings": []}
    assert len(render_csv(comparison).splitlines()) == 1


def test_servers_and_lost_workers_are_told() -> None:
    trial = invented_trial("ps-async", 2, 0)
    first, second = trial.ranks
    server = first.model_copy(update={"rank": 2, "role": "server"})
    lost = second.model_copy(update={"lost": "was ended by SIGKILL"})
    table = comparison_table(compared(trial.model_copy(update={"ranks": (first, lost, server)})))
    assert cells(table, "ranks") == ("2+1",)
    assert cells(table, "label") == ("rank lost",)
    assert {"stale", "worker MiB"} <= {c.title.replace("\n", " ") for c in table.columns}
    (note,) = [note for note in table.notes if note.startswith("LOST")]
    assert "ps-async on 2 ranks: rank 1 was ended by SIGKILL; the numbers are" in note
    assert "stale" not in {c.title for c in comparison_table(compared(trial)).columns}


def test_nodes_have_one_name() -> None:
    """A column of their own in every table, and the same word in a note, after a name as it is."""
    varied = [{"placement.nodes": nodes, "recipe.cpu_offload": nodes == 2} for nodes in (1, 2)]
    trials = [
        invented_trial("single", 1, varied=varied[0]),
        *(invented_trial("ddp", 2, varied=one) for one in varied),
    ]
    columns = {column.title: column.cells for column in variants(compared(*trials).rows)}
    assert columns == {"variant": ("false", "false", "true"), "nodes": ("1", "1", "2")}
    assert variants(compared(trials[0]).rows[:0]) == []
    said = notes(*trials)
    assert not any("placement.nodes" in note for note in said)
    assert (
        "ddp on 2 ranks, nodes=2, recipe.cpu_offload=true is compared with"
        " single on 1 rank, nodes=1, recipe.cpu_offload=false." in said
    )
