"""The work that each strategy adds to a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmark.base.results.store import load_run
from shardmark.base.table.table import Missing, Table
from shardmark.bench.analysis.compare.comparison import Comparison, compare
from shardmark.bench.report.page.page import render_page
from shardmark.bench.report.views.registry import find_view
from tests.golden.invented import compare_trials, invented_trial
from tests.unit.bench.report.export.test_launch import planned, stored


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    return compare([load_run(Path(stored(tmp_path / "run", planned())))])


def effort(comparison: Comparison) -> Table:
    view, value = find_view("effort")
    (table,) = view.tables(comparison, value)
    return table


def test_each_strategy_has_a_line(comparison: Comparison) -> None:
    table = effort(comparison)
    by_name = dict(zip(table.values("strategy"), table.rows, strict=True))
    assert set(by_name) == {row.label for row in comparison.rows}
    assert by_name["single"][1:4] == ("none", 0, 0), "the script that is changed"
    lines = dict(zip(table.values("strategy"), table.values("changed_lines"), strict=True))
    hybrid = "fsdp-hybrid (shard_group=2)"
    assert lines["ddp"] < lines["fsdp"] == lines[hybrid]  # type: ignore[operator]  # numbers
    assert lines["ddp"] == 18
    assert by_name["zero-3"][1] == "deepspeed"
    assert by_name["zero-3"][2] > by_name["ddp"][2]  # type: ignore[operator]  # numbers
    assert "deepspeed" in str(by_name["zero-3"][4])
    assert isinstance(lines["ps-async"], Missing)
    assert by_name["ps-async"][4] == "none"


def test_a_strategy_without_an_example_has_no_lines(tmp_path: Path) -> None:
    trials = planned(ranks=8, strategies="[fsdp, fsdp-tp, tp, fsdp-tp-pp]")
    table = effort(compare([load_run(Path(stored(tmp_path / "run", trials)))]))
    fsdp, fsdp_tp, *others = table.values("changed_lines")
    assert fsdp < fsdp_tp  # type: ignore[operator]  # numbers
    assert all(isinstance(lines, Missing) for lines in others)


def test_features_are_lost_if_the_strategy_refuses_them(comparison: Comparison) -> None:
    table = effort(comparison)
    lost = dict(zip(table.values("strategy"), table.values("features_lost"), strict=True))
    assert lost["single"] == lost["ddp"] == "none"
    assert "compiled" in str(lost["zero-3"])
    assert "fp16" in str(lost["ps-async"])
    assert "compiled blocks" not in str(lost["fsdp"])


def test_the_page_has_the_table(comparison: Comparison, tmp_path: Path) -> None:
    page = render_page([load_run(tmp_path / "run")], comparison, (), None)
    assert '<details id="effort">' in page


def test_rows_that_are_no_strategy_are_left_out() -> None:
    table = effort(compare_trials(invented_trial("ddp", 2, trial={})))
    assert table.rows == ()
    assert table.notes
