"""The engine `slurm` inside an allocation: a step for each trial, and whose fault an end was."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardmark.config.engines import SlurmOptions
from shardmark.core.errors import InputError, ShardmarkError
from shardmark.launch.engines import submission
from shardmark.launch.nodes.roster import Roster
from shardmark.launch.outcome import Ending, LostNode, ProcessEnd
from shardmark.launch.slurm import engine as slurm
from shardmark.launch.slurm import step as slurm_step
from shardmark.launch.slurm.engine import COMMON_STEP, SlurmEngine
from shardmark.launch.slurm.step import OTHER_TASKS, Step, own_name, step_words
from shardmark.launch.trial import TrialRunner
from shardmark.results.schema import Outcome
from shardmark.results.store import RunFolder
from shardmark.trials.matrix import expand
from shardmark.trials.trial import Trial
from tests.unit.launch.fakes import CPU, FINE, FakeEngine, Remembers, experiment
from tests.unit.launch.nodes import KEY
from tests.unit.launch.test_cluster import two_node_trial

FAILED = Ending(
    how="exited",
    agent_exit_code=1,
    failures=(ProcessEnd(rank=1, exit_code=-15, at_seconds=1.0),),
    oom_kills=0,
    lost=LostNode(node=1, host="b", reason="its connection ended"),
)
SIZE = slurm.Size(nodes=2, name="e")
INSIDE = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURMD_NODENAME": "localhost",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
}


class FakeStep:
    """The engine of one step."""

    samples = True

    def __init__(self, nodes: int, title: str, calls: list[str]) -> None:
        self.title = f"{title}/{nodes}"
        self._calls = calls
        self.ending = FINE
        self.problem: Exception | None = None

    def machine(self, device: str) -> Any:
        self._calls.append(f"{self.title} machine {device}")
        return CPU

    def environments(self) -> list[dict[str, Any]]:
        return []

    def lacks(self, nodes: int) -> str | None:
        return f"{self.title} lacks {nodes}"

    def load(self, modules: Sequence[str], device_type: str) -> None:
        if self.problem is not None:
            raise self.problem
        self._calls.append(f"{self.title} load {' '.join(modules)} {device_type}")

    def prepare(self, trial: Trial) -> None: ...

    def run(self, directory: Path, **given: Any) -> Ending:
        self._calls.append(f"{self.title} {given.get('task', 'measure')} {directory.name}")
        return self.ending

    def close(self) -> None:
        self._calls.append(f"{self.title} close")


class Made:
    """Makes steps, and remembers them."""

    def __init__(self, *, step_per_trial: bool = True) -> None:
        self.calls: list[str] = []
        self.steps: list[FakeStep] = []
        self.is_ending = False
        self.before: Callable[[FakeStep], None] = lambda step: None  # noqa: ARG005
        self.engine = SlurmEngine(
            self._make,
            nodes=2,
            step_per_trial=step_per_trial,
            is_ending=lambda: self.is_ending,
        )

    def _make(self, nodes: int, title: str) -> FakeStep:
        self.steps.append(FakeStep(nodes, title, self.calls))
        self.before(self.steps[-1])
        return self.steps[-1]

    def run(self, directory: Path, **given: Any) -> Ending:
        return self.engine.run(directory, trial_seconds=9, on_tick=lambda: None, **given)


@pytest.fixture
def made() -> Iterator[Made]:
    found = Made()
    yield found
    found.engine.close()


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the first node of an allocation of two."""
    for name, value in INSIDE.items():
        monkeypatch.setenv(name, value)


def test_each_trial_is_a_step_with_its_libraries_loaded_beforehand(
    made: Made, tmp_path: Path
) -> None:
    trial = two_node_trial(tmp_path)
    small = trial.model_copy(update={"id": "small", "placement": None, "nodes": 1})
    made.engine.machine("cpu")
    made.engine.load(["torch"], "cpu")
    made.run(tmp_path / "a", task="testify")
    for each in (trial, small):
        made.engine.prepare(each)
        made.calls.append("clock")
        made.run(tmp_path / "b")
    common, first, second = f"{COMMON_STEP}/2", f"{trial.id}/2", "small/1"
    assert made.calls == [
        f"{common} machine cpu",
        f"{common} load torch cpu",
        f"{common} testify a",
        f"{common} close",
        f"{first} load torch cpu",
        "clock",
        f"{first} measure b",
        f"{first} close",
        f"{second} load torch cpu",
        "clock",
        f"{second} measure b",
    ]


def test_one_step_for_the_run_loads_once(tmp_path: Path) -> None:
    made = Made(step_per_trial=False)
    trial = two_node_trial(tmp_path)
    made.engine.machine("cpu")
    made.engine.load(["torch"], "cpu")
    for _ in range(2):
        made.engine.prepare(trial)
        made.run(tmp_path / "b")
    common = f"{COMMON_STEP}/2"
    measured = f"{common} measure b"
    assert made.calls == [f"{common} machine cpu", f"{common} load torch cpu", measured, measured]
    assert made.engine.lacks(2) == f"{common} lacks 2"
    made.engine.close()
    assert made.calls[-1] == f"{common} close"


def test_step_that_does_not_come_makes_trials_on_as_many_nodes_unavailable(
    made: Made, tmp_path: Path
) -> None:
    trial = two_node_trial(tmp_path)
    made.engine.load(["torch"], "cpu")
    made.before = lambda step: setattr(step, "problem", ShardmarkError("node 1 has not come"))
    assert made.engine.lacks(2) is None
    made.engine.prepare(trial)
    assert made.engine.lacks(2) == "node 1 has not come"
    assert made.engine.lacks(1) is None
    assert made.engine.lacks(3) == "3 nodes are asked for, and the allocation has 2"
    assert made.calls[-1].endswith("close")


def test_what_the_user_has_to_mend_ends_the_run(made: Made, tmp_path: Path) -> None:
    trial = two_node_trial(tmp_path)
    made.engine.load(["nowhere"], "cpu")
    made.before = lambda step: setattr(step, "problem", InputError("model", "missing", "one"))
    with pytest.raises(InputError, match="model: missing"):
        made.engine.prepare(trial)


@pytest.mark.parametrize(("is_ending", "how"), [(True, "interrupted"), (False, "exited")])
def test_ranks_that_the_scheduler_ended_have_not_failed(
    *, is_ending: bool, how: str, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "NOTICE_SECONDS", 0.01)
    made.is_ending = is_ending
    made.before = lambda step: setattr(step, "ending", FAILED)
    ending = made.run(tmp_path)
    assert ending.how == how
    assert (ending.lost is None) == is_ending


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"SLURM_JOB_ID": None}, "engine.name: slurm, outside an allocation"),
        ({"SLURM_JOB_NUM_NODES": "1"}, "the allocation has 1, and the experiment takes 2 nodes"),
        ({"SLURM_NODEID": "1"}, "this is not the allocation's first node"),
    ],
)
def test_place_where_nothing_can_be_controlled(
    changes: dict[str, str | None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in changes.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=said):
        slurm.build(SlurmOptions(), SIZE, KEY, lambda _: None)


@pytest.mark.usefixtures("inside")
def test_name_of_the_first_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_name(SlurmOptions()) == "localhost"
    assert own_name(SlurmOptions(host="ib0.node1")) == "ib0.node1"
    monkeypatch.setenv("SLURMD_NODENAME", "nowhere.invalid")
    monkeypatch.setattr("platform.node", lambda: "none.invalid")
    with pytest.raises(InputError, match=r"engine\.host: missing, and nowhere\.invalid and none"):
        own_name(SlurmOptions())


@pytest.mark.usefixtures("inside")
def test_address_of_another_node_cannot_be_listened_at() -> None:
    engine = slurm.build(SlurmOptions(host="192.0.2.1"), SIZE, KEY, lambda _: None)
    with pytest.raises(InputError, match=r"engine\.host: this node cannot listen at 192\.0\.2\.1"):
        engine.machine("cpu")
    engine.close()


def test_words_of_a_step() -> None:
    options = SlurmOptions(gpus_per_node=4, srun=("--mpi=none",), interface="ib0")
    words = step_words(options, 2, {"torch": "1"}, title="t", host="node1", port=9)
    assert words[:4] == ["srun", "--job-name=t", "--nodes=2", "--ntasks=2"]
    assert {"--ntasks-per-node=1", "--overlap", "--gpus-per-node=4", "--mpi=none"} <= {*words}
    assert words[words.index("-m") :] == [
        *("-m", "shardmark.launch.nodes.joining", "--host", "node1", "--port", "9"),
        *("--number-from", "SLURM_PROCID", "--here", "--join-seconds", "300"),
        *("--key", "torch=1", "--interface", "ib0"),
    ]


def test_container_is_pyxis_with_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    image = "nvcr.io#nvidia/pytorch:26.09-py3"
    options = SlurmOptions(container=image, container_mounts=("/d:/d",))
    words = step_words(options, 1, {}, title="t", host="h", port=9)
    assert f"--container-image={image}" in words
    assert f"--container-mounts={tmp_path}:{tmp_path},/d:/d" in words
    assert f"--container-workdir={tmp_path}" in words
    assert words[words.index("-m") - 1] == "python3"
    wrapped = SlurmOptions(python="apptainer exec --nv image.sif python")
    words = step_words(wrapped, 1, {}, title="t", host="h", port=9)
    start = words.index("apptainer")
    assert words[start : start + 5] == ["apptainer", "exec", "--nv", "image.sif", "python"]


FAKE_SRUN = """#!/bin/sh
printf '%s\\n' "$@" > "{folder}/words"
env > "{folder}/environment"
{then}
"""


def fake_srun(folder: Path, then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "srun"
    program.write_text(FAKE_SRUN.format(folder=folder, then=then))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


@pytest.fixture
def roster() -> Iterator[Roster]:
    made = Roster(("127.0.0.1", 0), wanted=1, key=KEY, patience=5)
    yield made
    made.close()


@pytest.mark.usefixtures("inside")
def test_step_that_cannot_start_says_why(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in OTHER_TASKS:
        monkeypatch.setenv(name, "4")
    fake_srun(tmp_path, "echo 'srun: error: no such node' >&2; exit 3", monkeypatch)
    step = Step(SlurmOptions(), 2, KEY, job="7", title="t")
    step.start(roster)
    with pytest.raises(ShardmarkError, match=r"the step t ended with code 3 .* no such node"):
        roster.wait(20, step.check, lambda _: None)
    step.close()
    assert f"--port\n{roster.port}\n" in (tmp_path / "words").read_text()
    left = (tmp_path / "environment").read_text()
    assert not any(f"{name}=" in left for name in OTHER_TASKS), "tasks would get parts of the node"
    assert "SLURM_JOB_ID=7" in left


@pytest.mark.usefixtures("inside")
def test_step_that_does_not_end_is_ended(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told to, cancelled by its name, and killed in the end."""
    ended: list[str] = []
    monkeypatch.setattr(slurm_step, "END_SECONDS", 0.1)
    monkeypatch.setattr(slurm_step, "steps_named", lambda job, name: [f"{job}.3 {name}"])
    monkeypatch.setattr(slurm_step, "cancel", ended.append)
    fake_srun(tmp_path, 'trap "" TERM; while :; do sleep 0.1; done', monkeypatch)
    step = Step(SlurmOptions(), 1, KEY, job="7", title="t")
    step.start(roster)
    step.check()
    step.close()
    assert ended == ["7.3 t"]
    step.close()


@pytest.mark.usefixtures("inside")
def test_without_srun(roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    step = Step(SlurmOptions(), 1, KEY, job="7", title="t")
    with pytest.raises(InputError, match=r"slurm, and srun cannot be run: No such file"):
        step.start(roster)


def test_dry_run_shows_script_and_step_without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "submitit", None)
    asked = ("engine.partition=gpu", "engine.time=2:00:00", "engine.setup=[module load cuda]")
    two = ("engine.name=slurm", "placement.nodes=2", "matrix.strategy=[ddp]", *asked)
    lines = submission(experiment(*two), ["shardmark", "run", "e.yaml"])
    assert lines[:-1] == [
        "#SBATCH --job-name=shardmark-faked",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --partition=gpu",
        "#SBATCH --time=2:00:00",
        "#SBATCH --exclusive",
        "module load cuda",
        "shardmark run e.yaml",
    ]
    assert lines[-1].startswith("each trial: srun --job-name=TRIAL --nodes=2 --ntasks=2 ")


def test_what_is_prepared_is_not_in_the_trials_time(tmp_path: Path) -> None:
    """Start-up means the same with every engine; what cannot run has nothing prepared."""
    engine, prepared = FakeEngine(), list[float]()

    def prepare(trial: Trial) -> None:
        del trial
        prepared.append(time.time())

    engine.prepare = prepare  # type: ignore[method-assign]  # to see the clock
    folder = RunFolder.create(tmp_path / "run")
    runner = TrialRunner(engine=engine, machine=CPU, folder=folder, listener=Remembers())
    result = runner.run(two_node_trial(tmp_path), order=0)
    assert (result.outcome, prepared) == (Outcome.UNAVAILABLE, [])
    (trial,) = expand(experiment("matrix.strategy=[ddp]"), "cpu").trials
    result = runner.run(trial, order=1)
    assert result.outcome is Outcome.OK
    assert prepared[0] <= result.started_at_seconds
