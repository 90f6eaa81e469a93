"""`shardmark run` without running anything: exit codes, messages, the plan."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardmark import cli
from shardmark.base.results.files import write_model
from shardmark.base.results.fingerprint import FINGERPRINT_FILE, Fingerprint
from shardmark.base.results.schema import Failure, Outcome
from shardmark.base.results.store import RunFolder, load_run
from shardmark.base.results.verification import Verification, write_verification
from shardmark.bench.analysis.compare.comparison import compare
from shardmark.bench.launch import session
from shardmark.bench.launch.run_options import RunOptions
from shardmark.bench.progress.lines import Quiet
from shardmark.bench.report.answers.overview import overview
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.load import load_experiment
from shardmark.experiment.matrix import expand
from tests.golden.invented import invented_trial, write_run
from tests.json_fields import problems_of

Answer = Callable[..., tuple[int, str, str]]


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Answer:
    def ask(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["run", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return ask


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the arguments of `run_experiment`, which stores two invented trials."""
    calls: list[dict[str, Any]] = []

    def fake(experiment: Experiment, out: Path, options: RunOptions, **more: Any) -> Path:
        calls.append({"experiment": experiment, "out": out, "options": options, **more})
        return write_run(out, [invented_trial("single", 1), invented_trial("ddp", 2)])

    monkeypatch.setattr(session, "run_experiment", fake)
    return calls


def settings(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def test_run_ends_with_the_table_and_its_folder(
    answer: Answer, calls: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The printed commands can be pasted."""
    monkeypatch.setenv("HOME", str(tmp_path))
    changes = settings("epochs=1", "strategy=[ddp]", "model=resnet50")
    code, printed, err = answer("quickstart", *changes, "--retry", "--out", "~/a run")
    assert (code, err) == (0, "")
    assert "strategy" in printed
    assert f"report: shardmark report '{tmp_path}/a run'\n" in printed
    (call,) = calls
    assert (call["out"], call["options"]) == (tmp_path / "a run", RunOptions(retry=True))
    experiment = call["experiment"]
    assert (experiment.recipe.epochs, experiment.workload.model) == (1, "resnet50")
    assert experiment.matrix["strategy"] == ["ddp"]


@pytest.mark.usefixtures("calls")
def test_json_is_the_comparison_and_the_folder(answer: Answer, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, printed, err = answer("quickstart", "--out", str(out), "--format", "json")
    assert (code, err) == (0, "")
    document = json.loads(printed)
    assert problems_of("Comparison", document) == []
    assert document["run"] == str(out)
    assert [row["strategy"] for row in document["rows"]] == ["single", "ddp"]


@pytest.mark.parametrize("option", ["--quiet", "-q"])
def test_quiet_prints_only_the_table(
    answer: Answer,
    calls: list[dict[str, Any]],
    tmp_path: Path,
    option: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/quickstart", "runs/quickstart-2"):
        code, printed, err = answer("quickstart", option)
        assert (code, err) == (0, "")
        assert printed == overview(compare([load_run(Path(folder))], None))
    assert isinstance(calls[0]["listener"], Quiet)


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ((Outcome.OK, Outcome.OUT_OF_MEMORY, Outcome.UNAVAILABLE), 0),
        ((Outcome.OK, Outcome.FAILED), 1),
        ((Outcome.TIMED_OUT, Outcome.OK), 1),
    ],
)
def test_exit_code_shows_failures(
    answer: Answer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    outcomes: tuple[Outcome, ...],
    code: int,
) -> None:
    trials = [
        invented_trial(
            repeat=number,
            outcome=outcome,
            failure=None if outcome == "ok" else Failure(reason="it broke", remedy="mend it"),
        )
        for number, outcome in enumerate(outcomes)
    ]
    monkeypatch.setattr(
        session, "run_experiment", lambda _, out, *__, **___: write_run(out, trials)
    )
    ended, printed, _ = answer("quickstart", "--out", str(tmp_path / "run"))
    assert ended == code
    assert "files: " in printed, "the table comes all the same"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument"),
        (["quickstart", "--outt", "x"], "No such option"),
        (["a", "b"], "unexpected extra argument"),
        (["quickstrat"], "error: quickstrat: no such file, and no such preset; allowed is a file"),
        (["quickstart", "--set", "recipe.epochs"], "recipe.epochs"),
        (["quickstart", "--set", "recipe.epoch=3"], "nearest: 'epochs'"),
        (["quickstart", "--set", "matrix.strategy=[dpd]"], "found 'dpd'; nearest: 'dp', 'ddp'"),
        (["quickstart", "--dry-run", "--set", "recipe.global_batch=7"], "7 samples cannot be sha"),
        (["quickstart", "--dry-run", "--set", "recipe.steps=5"], "5 steps of warm-up, and 5 in"),
        (["quickstart", "--dry-run", "--set", "recipe.global_batch=2048"], "1437 to train on"),
        (["cifar10-strategies", "--dry-run", "--set", "data_dir=nowhere"], "nowhere: no such fol"),
        (["quickstart", "--budget", "half an hour"], "--budget: found 'half an hour'"),
        (["quickstart", "--set", "measure.repeats=often"], "{at_least: 3, at_most: 6, until: "),
        (["quickstart", "--set", "measure.repeats=0"], "measure.repeats"),
        (["quickstart", "--set", "measure.repeats={at_most: 2}"], "at_least 3 above at_most 2"),
    ],
)
def test_bad_input_is_a_message(
    answer: Answer, calls: list[dict[str, Any]], arguments: list[str], message: str
) -> None:
    code, printed, err = answer(*arguments)
    assert (code, printed) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert calls == []


def test_dry_run_prints_the_plan_and_writes_nothing(
    answer: Answer, calls: list[dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    mapping = {
        "name": "mine",
        "workload": {"name": "classification"},
        "recipe": {"global_batch": 8, "steps": 20},
        "matrix": {"strategy": ["single", "ddp"], "world_size": [1, 2]},
        "device": "cpu",
    }
    file.write_text(json.dumps(mapping))
    code, printed, err = answer(str(file), "--dry-run")
    assert (code, err) == (0, "")
    for fact in (r"single-w1-\S+ +single +1 rank +repeat 1 of 3 to 6\n", r"w2-\S+ +ddp +2 ranks"):
        assert re.search(fact, printed)
    assert "left out: single on 2 ranks (it runs on 1 rank): single is one" in printed
    assert re.search(r"single-w1-fp32-twin-\S+ +single +1 rank +twin\n", printed)
    assert "7 to 13 trials, 2 cells left out" in printed
    assert "at least" not in printed, "on a CPU steps count"
    assert "time: not known before a trial has run; each ends after 30 min at most" in printed
    assert calls == []
    assert {path.name for path in tmp_path.iterdir()} == {"mine.yaml"}


def test_dry_run_finds_a_schedule_that_fails_late(
    answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own, asked for fewer steps than the recipe has, raises in the first one beyond."""
    monkeypatch.chdir(tmp_path)
    for steps, code in ((39, 0), (38, 2)):
        path = "torch.optim.lr_scheduler:OneCycleLR"
        options = f"{{max_lr: 0.1, total_steps: {steps}, cycle_momentum: false}}"
        schedule = f"recipe.schedule={{name: own, path: '{path}', options: {options}}}"
        changes = settings("recipe.epochs=null", "recipe.steps=40", schedule)
        found, _, err = answer("quickstart", "--dry-run", *changes)
        assert found == code, err
    assert "OneCycleLR fails at step 39" in err


def test_dry_run_shows_varied_keys(answer: Answer) -> None:
    """The columns have every varied key of a cell, and at least two spaces between them."""
    changes = settings(
        "matrix.strategy=[{name: fsdp-hybrid, shard_group: 2}]",
        "matrix.world_size=[4]",
        "matrix.recipe.precision=[fp32,bf16]",
        "measure.repeats=2",
        "measure.warmup_seconds=2",
        "measure.window_seconds=30",
    )
    code, printed, err = answer("quickstart", "--dry-run", *changes)
    assert (code, err) == (0, "")
    assert "warm-up: at least 5 steps and 2 s\n" in printed
    assert "measured: at least 30 s; if the recipe is shorter, steps are added" in printed
    rows = [re.split(" {2,}", line.strip()) for line in printed.splitlines()]
    rows = [row for row in rows if "fsdp-hybrid" in row]
    assert {tuple(row[3:]) for row in rows} == {
        ("4 ranks", f"repeat {repeat} of 2", "shard_group=2", f"recipe.precision={precision}")
        for repeat in (1, 2)
        for precision in ("fp32", "bf16")
    }
    assert len({row[1] for row in rows}) == 4


def test_dry_run_shows_unavailable_trials(answer: Answer) -> None:
    """A single node has a reason; with several nodes, `local` says that it has none of them."""
    changes = settings(
        "strategy=fsdp",
        "world_size=2",
        "matrix.nodes=[1, 2]",
        "matrix.cpu_offload=[true, false]",
        "measure.repeats=1",
        "device=cpu",
    )
    code, printed, _ = answer("quickstart", "--dry-run", *changes)
    assert code == 0
    assert "  nodes=2" in printed
    lacks = "CPU offload needs a CUDA device"
    assert "local: trials on 2 nodes are recorded as unavailable here" in printed
    assert f"local: 1 trial is recorded as unavailable here: {lacks}" in printed
    _, printed, _ = answer("quickstart", "--dry-run", *changes, "--engine", "slurm")
    assert lacks not in printed, "other machines have what they have"


def test_dry_run_shows_models_that_cannot_be_divided(answer: Answer, tmp_path: Path) -> None:
    """Each mesh has a trial of its own, or a reason why it has none."""
    for name in ("train", "test"):
        (tmp_path / f"{name}.txt").write_text("a few words " * 500)
    meshes = ["{tensor: 4}", "{tensor: 2, pipeline: 2}", "{data: 2, tensor: 2}", "{shard: 3}"]
    changes = settings(
        "workload={name: language, model: gpt, layers: 2, width: 24, heads: 6, dataset: text, "
        f"tokenizer: bytes, sequence_length: 9, data_dir: {tmp_path}}}",
        f"matrix={{strategy: [fsdp-tp-pp, tp], strategy.mesh: [{', '.join(meshes)}]}}",
        "matrix.world_size=[4]",
        "measure.repeats=1",
        "device=cpu",
    )
    code, printed, err = answer("quickstart", "--dry-run", *changes)
    assert (code, err) == (0, "")
    rows = [line for line in printed.splitlines() if "  repeat 1" in line]
    assert [row.split("mesh=")[1] for row in sorted(rows, key=len)] == sorted(meshes[:3], key=len)
    assert len({row.split()[1] for row in rows}) == 3
    assert "left out: fsdp-tp-pp (mesh={shard: 3}) on 4 ranks: mesh shard 3 has 3 ranks" in printed
    assert "use sizes whose product is 4, or world_size 3" in printed
    assert "left out: tp: tp has no option mesh" in printed
    told = "6 heads cannot be divided over 4 tensor ranks; use 2 or 3 or 6 tensor ranks"
    assert f"local: 1 trial is recorded as unavailable here: {told}" in printed
    _, printed, _ = answer("quickstart", "--dry-run", *changes, "--engine", "slurm")
    assert told in printed, "whatever the machines"
    parts = settings("matrix={strategy: [ulysses]}", "matrix.world_size=[4]")
    _, printed, _ = answer("quickstart", "--dry-run", *changes, *parts)
    assert "6 heads cannot be divided over 4 ranks" in printed
    assert "(ulysses on 4 ranks)" in printed


def test_dry_run_estimates_time_from_earlier_trials(
    answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate uses the newest run of the experiment, or the trials in the folder already."""
    monkeypatch.chdir(tmp_path)
    changes = settings("strategy=[ddp]", "measure.repeats={at_least: 3, at_most: 6}", "device=cpu")
    experiment = load_experiment("quickstart", changes[1::2])
    first, second, third, *_ = expand(experiment, "cpu").trials
    measured = invented_trial(id=first.id, trial=first.model_dump(mode="json"), total_seconds=40.0)
    write_run(Path("runs/quickstart-2"), [measured])
    (write_run(Path("runs/quickstart-3"), [measured]) / "planted").symlink_to("elsewhere")
    _, printed, _ = answer("quickstart", "--dry-run", *changes)
    assert "then up to 3 more repeats" in printed
    assert "3 to 6 trials" in printed
    assert (
        "time: about 2 min to 4 min, as in runs/quickstart-2; plus loading and verifying\n"
        in printed
    )
    stopped, broken = (
        invented_trial(
            id=trial.id,
            trial=trial.model_dump(mode="json"),
            outcome=outcome,
            failure=Failure(reason="it ended early"),
        )
        for trial, outcome in ((second, Outcome.INTERRUPTED), (third, Outcome.FAILED))
    )
    write_run(Path("here"), [measured, stopped], experiment=experiment.model_dump(mode="json"))
    write_model(Path("here") / FINGERPRINT_FILE, Fingerprint())
    _, printed, _ = answer("quickstart", "--dry-run", *changes, "--out", "here", "--budget", "2m")
    assert "time: about 80 s to 3 min" in printed, "one trial has its result"
    assert re.search(rf"{first.id} .*  finished: ok\n", printed)
    assert re.search(rf"{second.id} .*  runs again: interrupted\n", printed)
    assert "3 to 6 trials, 1 finished, 0 cells left out" in printed
    assert "budget: 2 min, enough for at most 3 of the 3 to 6 repeats" in printed
    RunFolder(Path("here")).write_result(broken)
    for options, state, finished in (
        ([], "finished: failed", 2),
        (["--retry"], "runs again: f", 1),
    ):
        _, printed, _ = answer("quickstart", "--dry-run", *changes, "--out", "here", *options)
        assert re.search(rf"{third.id} .*  {state}", printed)
        assert f"3 to 6 trials, {finished} finished, " in printed
    shutil.rmtree(Path("here") / "trials" / third.id)
    verified = Verification(reference="one process", steps=3, verdicts=(), seconds=30.0)
    write_verification(Path("here"), verified)
    for budget, reach in (
        ("2m", "at most 2 of the 3 to 6 repeats"),
        ("10m", "all, with 6 min for loading"),
    ):
        _, printed, _ = answer(
            "quickstart", "--dry-run", *changes, "--out", "here", "--budget", budget
        )
        assert "time: about 2 min to 4 min, as in here; plus loading\n" in printed
        assert f"enough for {reach}" in printed
    _, printed, _ = answer("quickstart", "--dry-run", *changes, "--set", "steps=20")
    assert "time: not known" in printed, "other cells tell nothing"


@pytest.mark.parametrize("queued_again", [False, True])
def test_options_reach_the_run(
    answer: Answer,
    calls: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    queued_again: bool,
) -> None:
    """A job that is queued again does not set aside what it had measured."""
    if queued_again:
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    out = str(tmp_path / "run")
    code, _, _ = answer("quickstart", "--remeasure", "--budget", "1h30m", "--out", out)
    assert code == 0
    options = RunOptions(remeasure=not queued_again, budget_seconds=5400.0)
    assert calls[0]["options"] == options


def test_a_loss_that_is_not_finite_is_exit_code_1(
    answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake(_: Experiment, out: Path, *__: Any, **___: Any) -> Path:
        good = invented_trial("single", 1)
        bad = {"nonfinite_steps": 15, "first_nonfinite": (7, "NaN")}
        ranks = [rank.model_copy(update=bad) for rank in invented_trial("ddp", 2).ranks]
        return write_run(out, [good, invented_trial("ddp", 2, ranks=tuple(ranks))])

    monkeypatch.setattr(session, "run_experiment", fake)
    code, printed, _ = answer("quickstart", "--out", str(tmp_path / "run"))
    assert code == 1
    assert "ddp on 2 ranks: the loss is NaN from step 8 on." in printed
    assert "Fastest         single" in printed
