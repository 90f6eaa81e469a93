"""Predictions beside measured rows: they come from the same run, and start no code of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardmark.base.errors import InputError
from shardmark.base.results.network import RankSpeed, read_network, write_network
from shardmark.base.results.schema import TrialResult
from shardmark.base.results.store import StoredRun
from shardmark.base.table.table import Missing
from shardmark.bench.analysis.compare.comparison import compare
from shardmark.bench.analysis.network.links import with_fits
from shardmark.bench.report.figures import figures_of
from shardmark.bench.report.table.comparison import comparison_json, comparison_table
from shardmark.experiment.matrix import cells_of_any_size
from shardmark.predict.memory import rank_memory
from shardmark.predict.predicted.rows import Predictions
from tests import GOLDEN
from tests.unit.predict.made import MadeModels, made_profile
from tests.unit.predict.test_plan import experiment, measured

OWN = {"name": "own", "task": "tests.distributed.models:GroupedTokens"}


def rows_of(tmp_path: Path, *trials: Any) -> dict[str, Any]:
    comparison = compare([StoredRun(path=tmp_path, trials=trials)], None)
    return {row.strategy: row for row in comparison.rows}


def test_rows_are_predicted_from_the_smallest_of_their_run(tmp_path: Path) -> None:
    of = experiment(["single", "ddp"])
    rows = rows_of(tmp_path, measured("single", 1, 2.0, of), measured("ddp", 8, 2.2, of))
    predictions = Predictions([*rows.values()], MadeModels())
    rate = predictions.samples_per_second(rows["ddp"])
    assert 0.9 * 8 * 64 / 2.0 < rate < 8 * 64 / 2.0
    with pytest.raises(InputError, match="no undisturbed trial on fewer devices"):
        predictions.samples_per_second(rows["single"])
    cell = {cell.strategy.name: cell for cell in cells_of_any_size(of)[0]}["ddp"]
    memory = rank_memory(
        made_profile(), cell.built_strategy, cell.recipe, 8, device_type="cuda"
    ).peak_bytes
    assert predictions.peak_memory_bytes(rows["ddp"]) == memory


def test_what_cannot_be_predicted_says_why(tmp_path: Path) -> None:
    of = experiment(["single", "ddp"])
    single, ddp = measured("single", 1, 2.0, of), measured("ddp", 8, 2.2, of)
    elsewhere = [rank.model_copy(update={"device": "abacus"}) for rank in single.ranks]
    rows = rows_of(tmp_path, single.model_copy(update={"ranks": tuple(elsewhere)}), ddp)
    predictions = Predictions([*rows.values()], MadeModels())
    with pytest.raises(InputError, match="the speed of its machine is not known"):
        predictions.samples_per_second(rows["ddp"])
    own = {**single.trial, "workload": OWN}
    rows = rows_of(tmp_path, single.model_copy(update={"trial": own}))
    with pytest.raises(InputError, match="its own code is not started"):
        predictions.peak_memory_bytes(rows["single"])
    for key, module in (("optimizer", "evil.py:Evil"), ("schedule", "evil.py:rate")):
        (tmp_path / "evil.py").write_text("raise SystemExit('it ran')")
        recipe = {**single.trial["recipe"], key: {"name": "own", "path": f"{tmp_path}/{module}"}}
        trial = single.trial | {"recipe": recipe}
        rows = rows_of(tmp_path, single.model_copy(update={"trial": trial}))
        with pytest.raises(InputError, match="its own code is not started"):
            predictions.peak_memory_bytes(rows["single"])
    rows = rows_of(tmp_path, single.model_copy(update={"trial": {**single.trial, "recipe": {}}}))
    with pytest.raises(InputError, match="another version"):
        predictions.peak_memory_bytes(rows["single"])


def test_the_column_has_both_beside_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardmark.predict.predicted.rows.Models", MadeModels)
    of = experiment(["single", "ddp"])
    run = StoredRun(
        path=tmp_path, trials=(measured("single", 1, 2.0, of), measured("ddp", 8, 2.2, of))
    )
    table = comparison_table(compare([run], None), ["predicted"])
    titles = [column.title for column in table.for_people()[0]]
    assert [title for title in titles if "predicted" in title] == [
        "predicted samples/s",
        "predicted peak",
    ]
    rates = table.values("predicted_samples_per_second")
    assert sum(isinstance(rate, Missing) for rate in rates) == 1
    reason = "no undisturbed trial on fewer devices"
    assert any(text.startswith(f"Not predicted for single: {reason}") for text in table.notes)
    rows = comparison_json(compare([run], None), ["predicted"])["rows"]
    told = {row["strategy"]: (row["predicted"], row["not_predicted"]) for row in rows}
    assert told["ddp"][0]["samples_per_second"] > 0
    assert told["ddp"][1] == {}
    assert told["single"][0]["samples_per_second"] is None
    assert told["single"][1]["samples_per_second"].startswith(f"predicted: {reason}")


def test_a_run_that_measured_its_machine_is_predicted_on_it(tmp_path: Path) -> None:
    """The device is in no file: the run's own links and cores replace its data."""
    record = read_network(GOLDEN)
    assert record is not None
    speed = RankSpeed(
        flops_per_second={"fp32": 1e11, "bf16": 1e11}, memory_bytes_per_second=1e10, shared=0.5
    )
    inside = [each.model_copy(update={"reach": "same_host"}) for each in record.operations]
    here = {"speed": speed, "hosts": ("here",) * 8, "operations": tuple(inside)}
    write_network(tmp_path, with_fits(record.model_copy(update=here)))
    of = experiment(["single", "ddp"])

    def on_cpu(trial: TrialResult) -> TrialResult:
        ranks = [rank.model_copy(update={"device": "cpu"}) for rank in trial.ranks]
        return trial.model_copy(update={"ranks": tuple(ranks)})

    rows = rows_of(
        tmp_path, on_cpu(measured("single", 1, 9000.0, of)), on_cpu(measured("ddp", 8, 9000.0, of))
    )
    predictions = Predictions([*rows.values()], MadeModels())
    seconds = 8 * 64 / predictions.samples_per_second(rows["ddp"])
    assert 2 * 9000.0 < seconds < 2.2 * 9000.0


def test_the_figure_has_what_was_predicted_beside_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardmark.predict.predicted.rows.Models", MadeModels)
    of = experiment(["single", "ddp"])
    run = StoredRun(
        path=tmp_path, trials=(measured("single", 1, 2.0, of), measured("ddp", 8, 2.2, of))
    )
    figures = {each.name: each for each in figures_of(compare([run], None), predicted=True)}
    speed, *_ = figures["predicted"].panels
    (ddp,) = (series for series in speed.series if series.name == "ddp")
    assert ddp.y == pytest.approx((8 * 64 / 2.2,))
    ((told,),) = (ddp.x,)
    off = abs(float(told) / (8 * 64 / 2.2) - 1)
    assert f"Speed is off by {off:.0%}." in figures["predicted"].caption
    assert "predicted" not in {each.name for each in figures_of(compare([run], None))}
