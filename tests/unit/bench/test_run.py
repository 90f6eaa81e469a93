"""Shardmark from Python: running, and a run's answers, tables and page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardmark
from shardmark.bench.launch import session
from shardmark.bench.launch.listener import ProgressListener
from shardmark.bench.launch.run_options import RunOptions
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.load import from_mapping, to_yaml
from tests.golden.invented import invented_trial, write_run

EXPERIMENT = {
    "name": "from-python",
    "workload": {"name": "classification", "model": "resnet18", "dataset": "digits"},
    "recipe": {"global_batch": 64, "steps": 10},
    "matrix": {"strategy": ["single"], "world_size": [1]},
}
SINGLE, DDP = invented_trial("single", 1), invented_trial("ddp", 2)


def test_public_names_exist() -> None:
    for name in shardmark.__all__:
        assert getattr(shardmark, name) is not None
        assert name in dir(shardmark)
    with pytest.raises(AttributeError, match="module 'shardmark' has no attribute 'nonsense'"):
        _ = shardmark.nonsense


@pytest.fixture
def run(tmp_path: Path) -> shardmark.Run:
    trials = [invented_trial(s, n, r) for s, n in (("single", 1), ("ddp", 2)) for r in range(3)]
    return shardmark.load(write_run(tmp_path / "<b>", trials))


def test_load_reads_a_run(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [SINGLE, DDP])
    (path / "trials" / "ddp-2-0" / "log.txt").unlink()
    run = shardmark.load(str(path))
    assert (run.path, run.name) == (path, "invented")
    assert [trial.strategy for trial in run.trials] == ["single"]
    assert [damaged.reason for damaged in run.damaged] == ["log.txt is missing"]
    with pytest.raises(shardmark.InputError, match="measured were single"):
        run.compare("ddp")


def test_a_run_shows_itself(run: shardmark.Run) -> None:
    """The line is the one of the command; a notebook treats no part of it as markup."""
    assert repr(run) == f"<Run {str(run.path)!r}: 6 ok>"
    fastest = run.verdict.text
    for text in (str(run), run._repr_html_()):
        assert fastest in text
        assert "samples/s" in text
    assert "<b>" not in run._repr_html_()


def test_run_has_answers_and_verdicts(run: shardmark.Run) -> None:
    assert (run.verdict.strategy, run.verdict.decided) == ("ddp", True)
    assert "single" in run.verdict.text
    questions = [answer.question for answer in run.answers()]
    assert questions[-3:] == ["fastest", "memory", "equivalent"]
    assert run.verdict in run.answers()


def test_table_has_base_units_and_intervals(run: shardmark.Run) -> None:
    table = run.table()
    assert list(table["strategy"]) == ["ddp", "single"], "the fastest first"
    rate, low = table["samples_per_second"], table["samples_per_second_low"]
    assert rate[1] == pytest.approx(404.0)
    assert (low < rate).all()
    assert table["peak_memory_bytes"].min() > 1e8
    chosen = run.table("step_seconds", "verdict", baseline="ddp")
    assert list(chosen["verdict"]) == ["baseline", "slower"]
    assert chosen["step_seconds"][0] == pytest.approx(64 / rate[0], rel=0.01)
    with pytest.raises(shardmark.InputError, match="did you mean 'speedup'"):
        run.table("speedupp")


def test_report_is_written(run: shardmark.Run) -> None:
    page = run.report(baseline="ddp", images=False)
    assert page == run.path / "report.html"
    assert page.read_text().startswith("<!")


def test_report_has_a_published_study(run: shardmark.Run) -> None:
    page = run.report(images=False, against="ovi-2025")
    assert "Claims of ovi-2025" in page.read_text()
    with pytest.raises(shardmark.InputError, match="there is no study"):
        run.report(against="ovi")


def test_view_has_the_tables_of_the_command(run: shardmark.Run) -> None:
    (table,) = run.view("metrics").values()
    assert "samples_per_second" in set(table["metric"])
    tables = run.view("study:ovi-2025")
    claims = tables["Claims of ovi-2025"]
    assert {"claim", "finding", "measured", "measured_low"} <= set(claims.columns)
    with pytest.raises(shardmark.InputError, match="there is no view"):
        run.view("nonsense")


def test_an_empty_run_has_no_answers(tmp_path: Path) -> None:
    run = shardmark.load(write_run(tmp_path / "run", []))
    assert (run.answers(), run.verdict.decided, run.verdict.strategy) == ([], False, None)
    assert (len(run.table()), len(run.to_pandas())) == (0, 0)
    assert {"id", "outcome", "step_seconds"} <= set(run.to_pandas().columns)
    assert "no trials" in run._repr_html_()
    assert str(run)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Experiment, Path]]:
    """A controller that stores one trial, and what it was asked to run."""
    calls: list[tuple[Experiment, Path]] = []

    def fake(
        experiment: Experiment, out: Path, _: RunOptions, *, listener: ProgressListener
    ) -> Path:
        calls.append((experiment, out))
        listener.doing("loading torch")
        return write_run(out, [invented_trial()])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "run_experiment", fake)
    return calls


Asked = list[tuple[Experiment, Path]]


def test_run_takes_a_mapping_a_file_or_an_experiment(
    asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(to_yaml(from_mapping(EXPERIMENT)))
    for given in (EXPERIMENT, from_mapping(EXPERIMENT), file, str(file)):
        run = shardmark.run(given, name="changed", measure={"repeats": 2})
        assert len(run.trials) == 1
    assert {experiment.measure.repeats.at_most for experiment, _ in asked} == {2}
    folders = [f"runs/changed{number}" for number in ("", "-2", "-3", "-4")]
    assert [str(folder) for _, folder in asked] == folders
    assert capsys.readouterr().out.count("loading torch") == 4, "nobody waits in silence"
    shardmark.run(EXPERIMENT, out=tmp_path / "out", progress=False)
    assert asked[-1][1] == tmp_path / "out"
    assert capsys.readouterr().out == ""


def test_keywords_change_keys_of_the_file(asked: Asked) -> None:
    shardmark.run(
        EXPERIMENT,
        steps=7,
        strategy=["single", {"name": "ddp", "bucket_mb": 1.0}],
        world_size=2,
        dataset="random",
        recipe={"optimizer": {"lr": 0.5}},
        matrix={"precision": ["bf16"]},
        data_dir=Path("data"),
    )
    ((experiment, _),) = asked
    assert (experiment.recipe.steps, experiment.recipe.optimizer.lr) == (7, 0.5)
    assert experiment.matrix["recipe.precision"] == ["bf16"]
    assert experiment.matrix["world_size"] == [2]
    assert [str(entry)[:6] for entry in experiment.matrix["strategy"]] == ["single", "{'name"]
    workload = experiment.workload.model_dump()
    assert (workload["dataset"], workload["data_dir"]) == ("random", "data")


@pytest.mark.parametrize(
    ("experiment", "overrides", "message"),
    [
        ("nonsense", {}, "no such file, and no such preset"),
        (EXPERIMENT, {"stepz": 7}, "no such key"),
        (EXPERIMENT, {"model": lambda num_classes: num_classes}, "model: <lambda> is defined in"),
    ],
)
def test_invalid_experiment_is_refused(
    asked: Asked, experiment: Any, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(shardmark.InputError, match=message):
        shardmark.run(experiment, **overrides)
    assert not asked
