"""A whole run on an engine without processes: planned, resumed, refused, interrupted."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardmark.base.errors import DataError, InputError
from shardmark.base.machine import Machine
from shardmark.base.results.fingerprint import Fingerprint
from shardmark.base.results.schema import Outcome, ProbeRecord, StabilityFinding, StabilityKind
from shardmark.base.results.store import RunFolder, load_run
from shardmark.base.results.verification import (
    Verdict,
    Verification,
    read_verification,
    write_verification,
)
from shardmark.bench.launch.engine import TurnsRefusedError
from shardmark.bench.launch.fingerprint import check_same_run, fingerprint_of
from shardmark.bench.launch.outcome import Ending
from shardmark.bench.launch.run_options import RunOptions
from shardmark.bench.launch.session import run_experiment, verify_experiment
from shardmark.bench.launch.trial_queue import cell_of
from shardmark.experiment.load import from_mapping
from shardmark.experiment.matrix import expand
from shardmark.ranks.trial import Trial
from tests import present
from tests.unit.bench.launch.fakes import (
    CPU,
    FAILED,
    FINE,
    INTERRUPTED,
    TIMED_OUT,
    FakeEngine,
    RecordingListener,
    experiment,
    leave_files,
)
from tests.unit.bench.reference.verdicts import BAD, GOOD


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


def run(
    out: Path,
    *overrides: str,
    options: RunOptions | None = None,
    **engine: Any,
) -> tuple[FakeEngine, RecordingListener]:
    made, listener = FakeEngine(**engine), RecordingListener()
    run_experiment(experiment(*overrides), out, options, listener=listener, engine=made)
    return made, listener


def outcomes(out: Path) -> dict[str, str]:
    return {trial.strategy: str(trial.outcome) for trial in load_run(out, verify=True).trials}


def test_time_of_verification_is_not_reported_without_one(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the machine takes before the first trial."""
    now = [0.0]

    def remove(*_: object, **__: object) -> None:
        now[0] += 1000

    monkeypatch.setattr("shardmark.bench.launch.session.time.monotonic", lambda: now[0])
    monkeypatch.setattr("shardmark.bench.launch.session.shutil.rmtree", remove)
    _, listener = run(out)
    assert not [note for note in listener.notes if "verification took" in note]


def test_every_trial_runs_once_and_is_reported(out: Path) -> None:
    engine, listener = run(out)
    assert engine.calls[:2] == ["machine cpu", "load cpu"]
    assert engine.calls[-1] == "close"
    assert engine.names == ["ddp", "single"]
    assert outcomes(out) == {"single": "ok", "ddp": "ok"}
    assert listener.plans == [(2, 0, 0)]
    assert listener.started == [(1, 2), (2, 2)]
    assert listener.ended == [(1, 2, "ok"), (2, 2, "ok")]
    loading, expected = listener.notes
    assert (loading, expected.partition(";")[0]) == (
        "loading torch",
        "time: not known before a trial has run",
    )
    assert from_mapping(yaml.safe_load((out / "experiment.yaml").read_text())) == experiment()
    engine, listener = run(out)
    assert engine.calls == ["machine cpu", "close"], "nothing is loaded, nothing run"
    assert listener.plans == [(2, 2, 0)]


def test_gpus_in_use_are_reported_before_the_trials(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = {"name": "NVIDIA H200", "processes": 2, "memory_used_bytes": 3 * 2**30}
    devices = [{"uuid": uuid, **used} for uuid in ("GPU-a", "GPU-b")]
    cuda = {"devices": devices, "visible": ["GPU-b"]}
    monkeypatch.setattr("shardmark.bench.launch.session.environment", lambda: {"cuda": cuda})
    nccl = (("NCCL", "2.27.3"),)
    _, listener = run(
        out, machine=Machine(device_type="cuda", device_count=2, cores=2, libraries=nccl)
    )
    (note,) = [note for note in listener.notes if "not free" in note]
    assert "GPU 1 (NVIDIA H200)" in note
    assert "2 processes hold 3.0 GiB" in note
    assert RunFolder(out).read_environment()["libraries"] == dict(nccl)


def test_modules_of_all_trials_load_once_before_them(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank would import torchvision's detectors anew."""
    engine, _ = run(out, "matrix.strategy=[ddp, fsdp, fsdp-grad-op]")
    libraries = ["torch.distributed.fsdp", "torch.nn.parallel"]
    assert sorted(engine.loaded) == ["shardmark.ranks.workloads.vision.task", *libraries]
    monkeypatch.setattr("shardmark.bench.launch.input_checks.check_data", lambda _: 1600)
    monkeypatch.setattr("shardmark.bench.launch.fingerprint.data_paths", lambda _: ())
    engine, _ = run(out.with_name("other"), "workload={name: detection}")
    assert engine.loaded.count("shardmark.extras.detection.task") == 1


@pytest.mark.parametrize(
    ("overrides", "new", "plan"),
    [
        (("matrix.strategy=[single, ddp, fsdp]", "limits.trial_seconds=5"), ["fsdp"], (3, 2, 0)),
        (("measure.repeats=2",), ["ddp", "single"], (4, 2, 0)),
        (("matrix.world_size=[1, 2]",), [], (2, 2, 2)),
        (
            ("matrix.nodes=[1, 2]", "matrix.world_size=[2]", "engine.name=torchrun"),
            ["ddp"],
            (3, 2, 2),
        ),
    ],
    ids=["strategy", "repeat", "cells without sense", "nodes and engine"],
)
def test_larger_matrix_runs_only_new_trials(
    out: Path, overrides: tuple[str, ...], new: list[str], plan: tuple[int, int, int]
) -> None:
    run(out)
    engine, listener = run(out, *overrides, nodes=2)
    assert engine.names == new
    assert listener.plans == [plan]


@pytest.mark.parametrize(("kind", "end"), [("failed", FAILED), ("timed_out", TIMED_OUT)])
def test_retry_repeats_failed_trials(out: Path, kind: str, end: Any) -> None:
    """Ctrl-C or a budget may come first."""
    run(out, ends={"ddp": end})
    assert run(out)[0].names == []
    run(out, options=RunOptions(retry=True, budget_seconds=0.0))
    assert outcomes(out) == {"single": "ok", "ddp": kind}
    assert run(out, options=RunOptions(retry=True))[0].names == ["ddp"]
    assert outcomes(out) == {"single": "ok", "ddp": "ok"}
    (aside,) = (out / "set-aside").iterdir()
    assert aside.name.endswith(f".{kind}-1")
    assert json.loads((aside / "result.json").read_text())["outcome"] == kind


def test_an_engine_that_fails_is_closed(out: Path) -> None:
    engine = FakeEngine({"single": OSError("gone"), "ddp": OSError("gone")})
    with pytest.raises(OSError, match="gone"):
        run_experiment(experiment(), out, engine=engine)
    assert engine.calls[-1] == "close"


def test_interrupted_trial_is_stored_and_repeated_later(out: Path) -> None:
    engine = FakeEngine({"single": INTERRUPTED, "ddp": INTERRUPTED})
    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment(), out, engine=engine)
    assert len(engine.ran) == 1, "the next trial is not begun"
    assert engine.calls[-1] == "close"
    assert [trial.outcome for trial in load_run(out).trials] == [Outcome.INTERRUPTED]
    assert run(out)[0].names == ["ddp", "single"]
    assert outcomes(out) == {"single": "ok", "ddp": "ok"}


def test_unavailable_trial_is_stored_and_checked_again(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = "matrix.strategy=[zero-1, ddp]"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "deepspeed", None)
        assert run(out, asked)[0].names == ["ddp"]
    stored = {trial.strategy: trial for trial in load_run(out).trials}["zero-1"]
    assert stored.outcome is Outcome.UNAVAILABLE
    assert present(stored.failure).remedy == "pip install 'shardmark[deepspeed]'"
    assert (stored.metrics, stored.ranks) == ({}, ())
    assert [path.name for path in out.glob("trials/zero-1-*/*")] == ["result.json"]
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/bin/{name}")  # noqa: ARG005
    assert run(out, asked)[0].names == ["zero-1"]


@pytest.mark.parametrize("file", ["result.json", "steps.jsonl", "log.txt"])
def test_truncated_file_is_reported_and_measured_again(out: Path, file: str) -> None:
    run(out)
    (path,) = out.glob(f"trials/ddp-*/{file}")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    engine, listener = run(out)
    assert engine.names == ["ddp"]
    assert listener.plans == [(2, 1, 0)]
    assert any("measured again" in note and file in note for note in listener.notes)
    (aside,) = (out / "set-aside").iterdir()
    assert aside.name.startswith("ddp-")
    assert aside.name.endswith(".damaged-1")
    assert outcomes(out) == {"single": "ok", "ddp": "ok"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("recipe.steps=5", "holds a run with recipe.steps = 4, here it is 5"),
        ("workload.model=resnet50", "workload.model = 'resnet18', here it is 'resnet50'"),
        ("measure.warmup_steps=2", "measure.warmup_steps = 1, here it is 2"),
        ("name=other", "name = 'faked', here it is 'other'"),
        ("recipe.tf32=true", "recipe.tf32 = False, here it is True"),
        ("workload.model_options={width_per_group: 32}", "workload.model_options"),
    ],
)
def test_folder_of_another_experiment_is_refused(out: Path, override: str, message: str) -> None:
    run(out)
    engine = FakeEngine()
    with pytest.raises(InputError) as caught:
        run_experiment(experiment(override), out, engine=engine)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{out}: ")
    assert engine.calls == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("workload.dataset=imagefolder", "workload.data_dir=nowhere"), "nowhere"),
        (
            ("matrix.workload.dataset=[digits, imagefolder]", "workload.data_dir=nowhere"),
            "nowhere",
        ),
        (("recipe.global_batch=7",), "cannot be shared equally"),
        (("recipe.global_batch=2000",), "2000 samples a step, and 1437 to train on"),
        (("measure.warmup_steps=4",), "4 steps of warm-up, and 4 in all"),
        (
            ("recipe.epochs=2", "recipe.global_batch=1000", "measure.warmup_steps=2"),
            "2 steps of warm-up, and 2 in all",
        ),
    ],
    ids=["data", "data of another cell", "batch", "data for a batch", "steps", "epochs"],
)
def test_input_is_checked_before_anything_is_made(
    out: Path, overrides: tuple[str, ...], message: str
) -> None:
    engine = FakeEngine()
    with pytest.raises((DataError, InputError), match=message):
        run_experiment(experiment(*overrides), out, engine=engine)
    assert engine.calls == []
    assert not out.exists()


def test_trials_use_the_machines_device(out: Path) -> None:
    gpus = Machine(device_type="cuda", device_count=2, cores=2)
    engine, _ = run(out, "device=auto", machine=gpus)
    assert {trial.device_type for trial in engine.ran} == {"cuda"}
    assert engine.calls[1] == "load cuda"


def test_environment_lists_nodes(out: Path) -> None:
    run(out, nodes=3)
    stored = json.loads((out / "environment.json").read_text())
    assert [node["host"] for node in stored["nodes"]] == ["host-1", "host-2"]
    lacking = out.with_name("lacking")
    run(lacking, "placement.nodes=2")
    assert outcomes(lacking) == {"single": "ok", "ddp": "unavailable"}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's model in the current folder, and what it imports."""
    (tmp_path / "my_model.py").write_text("import my_parts\ndef net(num_classes): ...\n")
    (tmp_path / "my_parts.py").write_text("width = 8\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


OWN = "workload.model=my_model:net"


@pytest.mark.parametrize(
    ("file", "more"), [("my_model.py", ()), ("my_parts.py", ("measure.repeats=2",))]
)
def test_edited_model_is_refused_in_the_same_run(
    out: Path, model: Path, file: str, more: tuple[str, ...]
) -> None:
    run(out, OWN)
    with (model / file).open("a") as edited:
        edited.write("depth = 3\n")
    engine = FakeEngine()
    with pytest.raises(InputError, match=rf"the source of {file}; .*--out.*--remeasure"):
        run_experiment(experiment(OWN, *more), out, engine=engine)
    assert engine.calls == []
    with pytest.raises(InputError, match=f"the source of {file}"):
        check_same_run(out, experiment(OWN), fingerprint_of(expand(experiment(OWN)).trials))
    engine, listener = run(out, OWN, *more, options=RunOptions(remeasure=True))
    assert len(engine.ran) == (4 if more else 2)
    assert any("set-aside/run-1" in note for note in listener.notes)
    assert outcomes(out / "set-aside" / "run-1") == {"single": "ok", "ddp": "ok"}
    assert run(out, OWN, *more)[0].ran == [], "it can be taken up as ever"


def test_model_edited_during_the_run_ends_the_run(out: Path, model: Path) -> None:
    def edit(_: Path) -> None:
        (model / "my_parts.py").write_text("width = 16\n")

    engine = FakeEngine()
    engine.on_run = edit
    with pytest.raises(InputError, match=r"the source of my_parts\.py"):
        run_experiment(experiment(OWN), out, engine=engine)
    (result,) = load_run(out).trials
    assert result.outcome is Outcome.FAILED
    assert "my_parts.py" in present(result.failure).reason


def test_trial_with_another_model_structure_fails(out: Path) -> None:
    """The case of a module whose layers depend on a file that it reads."""
    structures = iter("ab")

    def built(directory: Path, ranks: int) -> None:
        probe = ProbeRecord(parameters=10).model_dump()
        leave_files(directory, ranks, probe=probe, structure_sha256=next(structures))

    engine = FakeEngine()
    engine.leave_files = built
    run_experiment(experiment("matrix.strategy=[ddp, fsdp]"), out, engine=engine)
    assert sorted(outcomes(out).values()) == ["failed", "ok"]
    failure = next(trial.failure for trial in load_run(out).trials if trial.failure is not None)
    assert "the model (its layers)" in failure.reason


@pytest.mark.parametrize("lost", ["fingerprint.json", "experiment.yaml"])
def test_run_without_its_description_is_refused(out: Path, lost: str) -> None:
    run(out)
    (out / lost).unlink()
    with pytest.raises(InputError, match=f"has results and no {lost}"):
        run(out)
    engine, _ = run(out, "recipe.steps=5", options=RunOptions(remeasure=True))
    assert {trial.recipe.steps for trial in engine.ran} == {5}
    assert outcomes(out / "set-aside" / "run-1") == {"single": "ok", "ddp": "ok"}


OTHERS = StabilityFinding(
    kind=StabilityKind.OTHER_PROCESSES, text="other programs used 95 % of the CPU", severity=0.95
)


@pytest.mark.parametrize(
    ("disturbed", "remeasure", "attempts"),
    [(0, 2, 1), (1, 2, 2), (2, 2, 3), (3, 2, 3), (3, 0, 1)],
)
def test_disturbed_trials_are_repeated_and_set_aside(
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    disturbed: int,
    remeasure: int,
    attempts: int,
) -> None:
    found = iter([(OTHERS,)] * disturbed)
    monkeypatch.setattr(
        "shardmark.bench.launch.trial.stability_of_trial", lambda *_: next(found, ())
    )
    engine, listener = run(out, "matrix.strategy=[ddp]", f"measure.max_remeasure={remeasure}")
    (result,) = load_run(out, verify=True).trials
    assert len(engine.ran) == result.attempt == attempts
    stays = OTHERS.text if disturbed >= attempts else None
    assert result.disturbed == stays
    kept = sorted((out / "set-aside").glob("*")) if attempts > 1 else []
    assert [path.name for path in kept] == [
        f"{result.id}.disturbed-{number}" for number in range(1, attempts)
    ]
    assert all((path / "result.json").exists() for path in kept)
    assert sum(OTHERS.text in note for note in listener.notes) == attempts - 1
    if stays:
        once = "matrix.strategy=[ddp]", "measure.max_remeasure=0"
        assert run(out, *once)[0].ran == []
        assert run(out, *once, options=RunOptions(retry=True, budget_seconds=0.0))[0].ran == []
        assert len(run(out, *once, options=RunOptions(retry=True))[0].ran) == 1
        assert len(list((out / "set-aside").iterdir())) == attempts


def test_busy_machine_stops_repeats_of_disturbed_trials(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardmark.bench.launch.trial.stability_of_trial", lambda *_: (OTHERS,))
    engine, _ = run(out, "measure.repeats=3")
    assert len(engine.ran) == 3 + 5, "the first trial alone is repeated"


def test_trials_beyond_the_budget_are_reported(out: Path) -> None:
    engine, listener = run(out, "measure.repeats=3", options=RunOptions(budget_seconds=0.0))
    assert engine.ran == []
    assert any("no time for 6 trials" in note for note in listener.notes)


def test_a_folder_takes_one_command_at_a_time(out: Path) -> None:
    def second(_: Path) -> None:
        with pytest.raises(InputError, match=rf"process {os.getpid()} on"):
            run_experiment(experiment(), out, engine=FakeEngine())

    engine = FakeEngine()
    engine.on_run = second
    run_experiment(experiment(), out, engine=engine)
    assert outcomes(out) == {"single": "ok", "ddp": "ok"}


def test_result_of_a_newer_version_is_refused(out: Path) -> None:
    run(out)
    (path,) = out.glob("trials/ddp-*/result.json")
    path.write_text(newer := json.dumps(json.loads(path.read_text()) | {"schema_version": 2}))
    for changes in ((), ("measure.repeats=2",)):
        engine = FakeEngine()
        with pytest.raises(InputError, match=r"of a newer shardmark; .*new folder"):
            run_experiment(experiment(*changes), out, engine=engine)
        assert engine.ran == []
    assert path.read_text() == newer


def test_folder_is_empty_again_if_the_engine_does_not_start(out: Path) -> None:
    class Broken(FakeEngine):
        def machine(self, device: str) -> Machine:
            raise InputError("device", f"found {device}", "no such device")

    with pytest.raises(InputError, match="no such device"):
        run_experiment(experiment(), out, engine=Broken())
    assert [*out.iterdir()] == []


def test_verdicts_on_other_cells_stay(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict that proved nothing stays, too."""
    once = "measure.verify=true", "matrix.strategy=[ddp]"

    def judged(cells: Sequence[Trial], **_: Any) -> list[Verdict]:
        return [GOOD.model_copy(update={"id": cell_of(cell)}) for cell in cells]

    monkeypatch.setattr("shardmark.bench.launch.session.verify_cells", judged)
    (RunFolder.create(out).path / ".verification" / "of-a-killed-command").mkdir(parents=True)
    unproven = GOOD.model_copy(update={"equivalent": None, "id": "elsewhere"})
    write_verification(out, Verification(reference="x", steps=3, verdicts=(unproven, BAD)))
    run(out, *once)
    stored = present(read_verification(out))
    assert stored.verdicts[:2] == (unproven, BAD)
    assert len(stored.verdicts) == 3
    assert not (out / ".verification").exists()


def test_run_reuses_verdicts_of_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    judged: list[list[str]] = []

    def judge(cells: Sequence[Trial], **_: Any) -> list[Verdict]:
        judged.append([cell.strategy.name for cell in cells])
        return [GOOD.model_copy(update={"id": cell_of(cell)}) for cell in cells]

    monkeypatch.setattr("shardmark.bench.launch.session.verify_cells", judge)
    small = experiment("measure.verify=true", "matrix.strategy=[ddp]")
    verify_experiment(small, tmp_path / "scratch", engine=FakeEngine(), store=True)
    both = "measure.verify=true", "measure.twin=false", "matrix.strategy=[single,ddp]"
    listener = run(tmp_path / "first", *both)[1]
    assert judged == [["ddp"], ["single"]]
    assert any("has verified 1 of 2 cells" in note for note in listener.notes)
    stored = present(read_verification(tmp_path / "first"))
    assert len(stored.verdicts) == 2
    other = Fingerprint(versions={"torch": "another"})
    monkeypatch.setattr("shardmark.bench.launch.fingerprint.versions_of", lambda _: other)
    run(tmp_path / "second", *both)
    assert sorted(judged[2]) == ["ddp", "single"]


class EngineWithTurns(FakeEngine):
    """Runs trials side by side; those with a name of `fail_beside` fail then."""

    fail_beside: tuple[str, ...] = ()
    refuses = False

    def run_in_turns(
        self, directories: Sequence[Path], *, trial_seconds: float, on_tick: Callable[[], None]
    ) -> list[Ending]:
        trials = [Trial.model_validate_json((d / "trial.json").read_text()) for d in directories]
        assert trial_seconds == sum(trial.limits.trial_seconds for trial in trials)
        if self.refuses:
            raise TurnsRefusedError("no reason")
        on_tick()
        names = [trial.strategy.name for trial in trials]
        self.calls.append(f"turns of {', '.join(sorted(names))}")
        for directory, name in zip(directories, names, strict=True):
            if name not in self.fail_beside:
                self.leave_files(directory, trials[0].world_size)
        return [FAILED if name in self.fail_beside else FINE for name in names]


def race(
    out: Path, engine: FakeEngine, *overrides: str, options: RunOptions | None = None
) -> RecordingListener:
    mapping = {
        "name": "race",
        "workload": {"name": "script", "command": __file__},
        "matrix": {"variant": {"one": "", "other": "--other"}},
        "measure": {"repeats": {"at_least": 2, "at_most": 2, "margin": 0.01}, "verify": False},
        "device": "cpu",
    }
    listener = RecordingListener()
    experiment = from_mapping(mapping, overrides)
    run_experiment(experiment, out, options, listener=listener, engine=engine)
    return listener


def test_a_race_without_time_names_what_it_leaves_open(out: Path) -> None:
    """It has no number of trials: as many as decide."""
    listener = race(out, EngineWithTurns(), options=RunOptions(budget_seconds=0.0))
    assert "not decided in the time of this race: other" in listener.notes
    assert not any("trials" in note for note in listener.notes)


def measured(engine: FakeEngine) -> list[str]:
    return [call for call in engine.calls if call.startswith(("turns", "run"))]


def test_the_trials_of_a_race_take_turns(out: Path) -> None:
    engine = EngineWithTurns()
    listener = race(out, engine)
    assert measured(engine) == ["turns of one, other"] * 2
    assert [number for number, _, _ in listener.ended] == [1, 2, 3, 4]
    run = load_run(out)
    assert [trial.outcome for trial in run.trials] == [Outcome.OK] * 4
    assert {trial.attempt for trial in run.trials} == {1}


def test_no_more_turns_after_a_trial_that_fails_only_beside_others(out: Path) -> None:
    engine = EngineWithTurns()
    engine.fail_beside = ("other",)
    listener = race(out, engine)
    first, second, *alone = measured(engine)
    assert [first, second] == ["turns of one, other", "run other"]
    assert sorted(alone) == ["run one", "run one", "run other"]
    assert [number for number, _, _ in listener.ended] == [1, 2, 3, 4], "no failure is a result"
    assert len([*out.glob("set-aside/*beside-others*")]) == 2
    assert any("fails beside others" in note for note in listener.notes)
    assert [trial.outcome for trial in load_run(out).trials] == [Outcome.OK] * 4


def test_the_others_take_turns_without_a_trial_that_always_fails(out: Path) -> None:
    engine = EngineWithTurns({"third": FAILED})
    engine.fail_beside = ("third",)
    race(out, engine, "matrix.variant={one: '', other: '--other', third: '--third'}")
    first, *rest = measured(engine)
    assert first == "turns of one, other, third"
    assert sorted(rest) == ["run third", "run third", *["turns of one, other"] * 2]
    results = {(trial.strategy, trial.outcome) for trial in load_run(out).trials}
    assert results == {("one", "ok"), ("other", "ok"), ("third", "failed")}


def test_a_failure_beside_others_is_no_result_after_an_interruption(out: Path) -> None:
    engine = EngineWithTurns(dict.fromkeys(("one", "other"), INTERRUPTED))
    engine.fail_beside = ("other",)
    with pytest.raises(KeyboardInterrupt):
        race(out, engine)
    assert {trial.outcome for trial in load_run(out).trials} == {Outcome.INTERRUPTED}


def test_trials_that_cannot_take_turns_run_alone(out: Path) -> None:
    engine = EngineWithTurns()
    engine.refuses = True
    listener = race(out, engine)
    assert len(measured(engine)) == 4
    assert any("no reason" in note for note in listener.notes)
    assert [trial.outcome for trial in load_run(out).trials] == [Outcome.OK] * 4


@pytest.mark.parametrize("change", ["gpu", "no race", "shared files"])
def test_no_turns_on_a_gpu_or_without_a_race(out: Path, change: str) -> None:
    machine = Machine(device_type="cuda", device_count=1, cores=2) if change == "gpu" else CPU
    overrides = {
        "gpu": "device=auto",
        "no race": "measure.repeats.margin=null",
        "shared files": "workload.writes_are_fine=true",
    }
    engine = EngineWithTurns(machine=machine)
    race(out, engine, overrides[change])
    assert not [call for call in engine.calls if call.startswith("turns")]
