"""The table of all metrics has a column for each row."""

from __future__ import annotations

from shardmark.bench.report.views.registry import find_view
from tests.golden.invented import compare_trials, invented_trial


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
