"""A stored run of every released schema version: each must still load."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmark.analysis.compare.comparison import compare
from shardmark.core.metrics import METRICS
from shardmark.report.table.comparison import comparison_table
from shardmark.results.schema import SCHEMA_VERSION, Outcome
from shardmark.results.store import load_run

NONE_OK = "no trial ended ok"
HERE = Path(__file__).parent
VERSIONS = sorted(path.name for path in HERE.glob("v*") if path.is_dir())


def test_todays_version_is_stored() -> None:
    assert f"v{SCHEMA_VERSION}" in VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_still_loads(version: str) -> None:
    run = load_run(HERE / version, verify=True)
    assert not run.damaged
    assert not run.missing
    assert len(run.trials) == 5
    assert {trial.outcome for trial in run.trials} == {Outcome.OK, Outcome.OUT_OF_MEMORY}
    ddp = next(row for row in compare([run]).rows if row.strategy == "ddp")
    speedup = ddp.metrics["speedup"]
    assert speedup is not None
    assert speedup.value == pytest.approx(2 / 1.1 * (1.02 / 1.01) ** 0.5)


def test_a_metric_younger_than_the_result_is_null_with_a_reason() -> None:
    run = load_run(HERE / "v1")
    assert not any("map" in trial.metrics for trial in run.trials)
    comparison = compare([run])
    for row in comparison.rows:
        assert set(row.metrics) == set(METRICS)
        assert row.metrics["map"] is None
        assert row.missing["map"] == ("not recorded" if row.outcomes.get("ok") else NONE_OK)
    columns, _ = comparison_table(comparison).for_people()
    assert "map" not in [column.key for column in columns]
