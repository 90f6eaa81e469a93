"""A stored file of each released format must still load."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import present

from shardmark.base.metrics import METRICS
from shardmark.base.results.network import read_network
from shardmark.base.results.schema import Outcome
from shardmark.base.results.store import RunFolder, load_run
from shardmark.bench.analysis.compare.comparison import compare
from shardmark.bench.analysis.network.links import with_fits
from shardmark.experiment.load import from_mapping

GOLDEN = Path(__file__).parent / "v1"


def test_run_loads_and_is_compared() -> None:
    run = load_run(GOLDEN, verify=True)
    assert (run.damaged, run.missing) == ((), ())
    assert {trial.outcome for trial in run.trials} == {Outcome.OK, Outcome.OUT_OF_MEMORY}
    ddp = next(row for row in compare([run]).rows if row.strategy == "ddp")
    speedup = present(ddp.metrics["speedup"])
    assert speedup.value == pytest.approx(2 / 1.1)


def test_experiment_environment_and_verdicts_load() -> None:
    folder = RunFolder(GOLDEN)
    assert from_mapping(folder.read_experiment()).name == "invented"
    assert folder.read_environment()["host"] == "invented"
    verification = present(load_run(GOLDEN).verification)
    assert [verdict.equivalent for verdict in verification.verdicts] == [True]


def test_metric_younger_than_the_result_is_null_with_a_reason() -> None:
    comparison = compare([load_run(GOLDEN)])
    for row in comparison.rows:
        assert set(row.metrics) == set(METRICS)
        assert all(row.missing[name] for name, value in row.metrics.items() if value is None)


def test_network_loads_and_is_fitted_alike() -> None:
    record = present(read_network(GOLDEN))
    assert record.hosts == ("node0", "node1")
    link, *_, without = record.operations
    again = with_fits(record).operations[0].fit
    for fit in (link.fit, again):
        assert fit is not None
        assert fit.bytes_per_second.value == pytest.approx(1.2e8, rel=1e-6)
        assert fit.latency_seconds.value == pytest.approx(1e-4, rel=1e-4)
    assert (without.fit, without.reason) == (None, "fewer than 3 sizes were measured")
