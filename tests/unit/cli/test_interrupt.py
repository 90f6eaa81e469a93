"""`shardmark run`, interrupted in each of its phases: what is told and what is stored."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from shardmark import cli
from shardmark.base.results.schema import Outcome, TrialResult
from shardmark.base.results.store import RunFolder, load_run
from shardmark.bench import improve, why
from shardmark.bench.launch import session
from shardmark.bench.launch.outcome import Ending
from shardmark.bench.launch.trial_artifacts import TRIAL_FILES, clear
from tests.unit.bench.launch.fakes import FakeEngine

SETTINGS = (
    "matrix.strategy=[single]",
    "matrix.world_size=[1]",
    "measure.repeats=2",
    "recipe.steps=20",
    "recipe.epochs=null",
    "limits.trial_seconds=30",
    "device=cpu",
)
"""Two trials."""
CHANGES = [word for setting in SETTINGS for word in ("--set", setting)]
INTERRUPTED = Ending(status="interrupted", agent_exit_code=-9, failures=(), oom_kills=0)
Captured = pytest.CaptureFixture[str]
Stop = Callable[..., Any]


def interrupt(*_: Any, **__: Any) -> Any:
    signal.raise_signal(signal.SIGINT)


def terminate(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """The engine of the controller's trials; nothing is verified."""
    engine = FakeEngine()
    monkeypatch.setattr(session, "build_engine", lambda *_: engine)
    monkeypatch.setattr(session.RunSession, "verify", lambda *_: None)
    return engine


def _when_emptying(patch: pytest.MonkeyPatch, stop: Stop) -> None:
    def stop_when_emptying(directory: Path, *, keep: Collection[str] = TRIAL_FILES) -> None:
        if not keep:
            stop()
        clear(directory, keep=keep)

    patch.setattr("shardmark.bench.launch.trial.clear", stop_when_emptying)


SUMMARISE = "shardmark.bench.launch.trial.summarise"
BEFORE_A_TRIAL: dict[str, Callable[[FakeEngine, pytest.MonkeyPatch, Stop], None]] = {
    "machine": lambda engine, patch, stop: patch.setattr(engine, "machine", stop),
    "loading": lambda engine, patch, stop: patch.setattr(engine, "load", stop),
    "verifying": lambda _, patch, stop: patch.setattr(session.RunSession, "verify", stop),
}
IN_A_TRIAL: dict[str, Callable[[FakeEngine, pytest.MonkeyPatch, Stop], None]] = {
    "preparing": lambda _, patch, stop: _when_emptying(patch, stop),
    "starting": lambda engine, patch, stop: patch.setattr(engine, "run", stop),
    # As the real engine, which ends the ranks itself and returns.
    "training": lambda engine, *_: engine.ends.update(single=INTERRUPTED),
    "summing up": lambda _, patch, stop: patch.setattr(
        "shardmark.bench.launch.trial.summarise", stop
    ),
}
PHASES = BEFORE_A_TRIAL | IN_A_TRIAL


@pytest.mark.parametrize(
    ("phase", "stop", "quiet"),
    [*((phase, interrupt, False) for phase in PHASES), ("starting", terminate, True)],
)
def test_interrupt_stores_the_trial_in_every_phase(
    *,
    phase: str,
    stop: Stop,
    quiet: bool,
    engine: FakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [*CHANGES, "--retry", "--budget", "1h", *(["--quiet"] if quiet else [])]
    command = ["run", "quickstart", *given]
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patched:
        PHASES[phase](engine, patched, stop)
        assert cli.main(command) == cli.INTERRUPTED
    assert signal.getsignal(signal.SIGTERM) is before
    printed = capsys.readouterr()
    others, _, again = printed.err.rstrip("\n").rpartition("interrupted; continue with: shardmark ")
    assert others == "", "and nothing else on standard error"
    words = shlex.split(again)
    folder = Path(words[-1])
    assert sorted(words) == sorted([*command, "--out", str(folder)])
    assert folder.parent == Path("runs"), "the folder that was made, though none was named"
    assert not (quiet and printed.out)
    assert (f"writing to {folder}\n" in printed.out) == (not quiet and phase != "machine")
    if phase in IN_A_TRIAL:
        run = load_run(folder, verify=True)
        (trial,) = run.trials
        assert (trial.outcome, run.damaged, run.missing) == (Outcome.INTERRUPTED, (), ())
        assert quiet or ": interrupted after " in printed.out.splitlines()[-1]
        left = {path.name for path in (folder / "trials" / trial.id).iterdir()}
        assert left <= {"result.json", "steps.jsonl", "samples.jsonl", "log.txt"}
    engine.ends.clear()
    assert cli.main(words) == 0
    outcomes = [trial.outcome for trial in load_run(folder).trials]
    assert outcomes == [Outcome.OK, Outcome.OK]
    assert {path.name for path in Path("runs").iterdir()} == {folder.name, "latest"}


@pytest.mark.usefixtures("engine")
def test_interrupt_keeps_a_finished_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted between the result and the end of the trial."""
    written = RunFolder.write_result

    def write_and_stop(folder: RunFolder, result: TrialResult) -> TrialResult:
        written(folder, result)
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "write_result", write_and_stop)
    out = tmp_path / "run"
    assert cli.main(["run", "quickstart", *CHANGES, "--out", str(out)]) == cli.INTERRUPTED
    assert [trial.outcome for trial in load_run(out).trials] == [Outcome.OK]


def test_repeated_command_names_the_unfinished_run(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """And a run that another command measures at that moment."""
    monkeypatch.chdir(tmp_path)
    command = ["run", "quickstart", *CHANGES]
    engine.ends.update(single=INTERRUPTED)
    assert cli.main(command) == cli.INTERRUPTED
    engine.ends.clear()
    capsys.readouterr()
    with RunFolder(Path("runs/quickstart")).locked(print):
        assert cli.main(command) == 0
    assert "another command measures into runs/quickstart now" in capsys.readouterr().err
    shutil.rmtree("runs/quickstart-2")
    assert cli.main(command) == 0
    _, found, words = capsys.readouterr().err.partition("to continue runs/quickstart: shardmark ")
    assert found
    assert cli.main(shlex.split(words)) == 0, "it goes on there"
    assert len(load_run(Path("runs/quickstart")).trials) == 2
    capsys.readouterr()
    assert cli.main(command) == 0
    assert capsys.readouterr().err == "", "the newest run of this experiment is finished"


@pytest.mark.parametrize("stop", [interrupt, terminate])
@pytest.mark.parametrize("verb", ["why", "time --improve"])
def test_verbs_that_run_variants_say_how_they_continue(
    verb: str, stop: Stop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    monkeypatch.setattr(why, "explain", stop)
    monkeypatch.setattr(improve, "improve", stop)
    assert cli.main([*verb.split(), "--out", "my run", "--", "train.py"]) == 130
    assert "continue with: the same command and --out 'my run'" in capsys.readouterr().err
