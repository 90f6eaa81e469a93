"""The engine `slurm`: what is asked of it, how a job is followed, and steps in an allocation."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from shardmark.config.engines import SlurmOptions
from shardmark.core.errors import InputError
from shardmark.launch.engine import RemoteCommand
from shardmark.launch.engines import submission
from shardmark.launch.slurm import engine as slurm
from shardmark.launch.slurm import job as slurm_job
from shardmark.launch.slurm.engine import Steps, own_name, step_words
from shardmark.launch.slurm.job import (
    Job,
    JobEndedError,
    JobState,
    flags,
    job_state,
    parameters,
    parse_job,
    sbatch_options,
)
from shardmark.trials.matrix import expand
from tests.unit.launch.fakes import experiment
from tests.unit.launch.nodes import KEY, request

TWO = ("placement.nodes=2", "matrix.strategy=[ddp]")
TRIALS = expand(experiment(*TWO), "cpu").trials
REQUEST = request(TRIALS)
INSIDE = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURMD_NODENAME": "localhost",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
}
PENDING = parse_job(
    "JobId=3 JobName=shardmark-nodes UserId=root(0) JobState=PENDING Reason=Resources "
    "Requeue=1 ExitCode=0:0 NodeList=(null) NumNodes=2 Power="
)
RUNNING = JobState(state="RUNNING", nodes="node[1-2]", first_node="node1")
COMPLETED = JobState(state="COMPLETED", exit_code=0, nodes="node[1-2]", first_node="node1")
TIMEOUT = JobState(state="TIMEOUT", exit_code=0, nodes="node[1-2]", first_node="node1")
UNSEEN = parse_job("JobState=FAILED ExitCode=0:53")
CANCELLED = parse_job(
    "JobState=CANCELLED Reason=None ExitCode=0:15 NodeList=node[1-2] BatchHost=node1"
)


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the first node of an allocation of two."""
    for name, value in INSIDE.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"time": "2:00"}, "found '2:00'; allowed are minutes, HH:MM:SS and D-HH:MM:SS"),
        ({"time": 0}, "greater than 0"),
        ({"sbatch": {"--mem": "1G"}}, "found '--mem'; allowed are long options without"),
        ({"sbatch": {"nodes": 3}}, "found 'nodes', which the engine says itself"),
        ({"step": "rank"}, "'trial' or 'run'"),
    ],
)
def test_options_that_say_nothing_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        SlurmOptions.model_validate(given)


def test_what_is_asked_of_sbatch() -> None:
    options = SlurmOptions(
        time="90",
        mem=0,
        gpus_per_node=4,
        exclusive=False,
        sbatch={"no-kill": True, "reservation": "next friday", "requeue": False},
    )
    assert flags(sbatch_options(options, REQUEST)) == [
        *("--job-name=shardmark-faked", "--nodes=2", "--ntasks-per-node=1", "--time=90"),
        *("--gpus-per-node=4", "--mem=0", "--no-kill", "--reservation='next friday'"),
    ]
    assert SlurmOptions(time="1-02:00:00").time == "1-02:00:00"


def test_submitit_asks_for_the_same_and_for_nothing_else(tmp_path: Path) -> None:
    submitit = pytest.importorskip("submitit")
    from submitit.slurm.slurm import _make_sbatch_string

    assert submitit.SlurmExecutor is not None
    options = SlurmOptions(partition="gpu", sbatch={"no-kill": True}, setup=("module load x",))
    asked = sbatch_options(options, REQUEST)
    script = _make_sbatch_string(
        "exec python", tmp_path, **parameters(asked), setup=[*options.setup]
    )
    lines = script.splitlines()
    begun = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    logs = {line for line in begun if line.startswith(("--output", "--error", "--open-mode"))}
    assert len(logs) == 3
    assert begun - logs == {*flags(asked), "--signal=B:CONT@1"}
    assert lines.index("module load x") < lines.index("exec python")


def test_dry_run_shows_script_and_step_without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "submitit", None)
    asked = ("engine.partition=gpu", "engine.time=2:00:00", "engine.setup=[module load cuda]")
    made = experiment(*TWO, "engine.name=slurm", *asked)
    lines = submission(made, expand(made), ["shardmark", "run"])
    assert lines[3:5] == ["#SBATCH --partition=gpu", "#SBATCH --time=2:00:00"]
    assert lines[-3:-1] == ["module load cuda", "shardmark run"]
    assert lines[-1].startswith("each trial: srun --job-name=TRIAL --nodes=2 --ntasks=2 ")


@pytest.mark.parametrize(
    ("scontrol", "sacct", "state"),
    [
        ("slurm_load_jobs error: Invalid job id specified\n", "CANCELLED by 0|0:15\n", "CANCELLED"),
        ("slurm_load_jobs error: Invalid job id specified\n", "", "UNKNOWN"),
        ("Unable to contact slurm controller", "", None),
    ],
)
def test_job_that_the_scheduler_does_not_tell_of(
    scontrol: str, sacct: str, state: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        if words[0] == "scontrol":
            return subprocess.CompletedProcess(words, 1, "", scontrol)
        return subprocess.CompletedProcess(words, 0, sacct, "")

    monkeypatch.setattr(slurm_job, "_slurm", run)
    known = job_state("3")
    assert (known.state if known is not None else None) == state


def test_host_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="slurm, and scontrol cannot be run"):
        job_state("3")


class FakeScheduler:
    """Has one job, whose states come one after another; `logged` is what it prints at each."""

    def __init__(self, folder: Path) -> None:
        self.states: list[JobState | BaseException | None] = []
        self.logged = ["measured\n"]
        self.submitted: list[list[str]] = []
        self.cancelled: list[str] = []
        self.complaint: str | None = None
        self._log = folder / "slurm" / "3_0_log.out"

    def submit(self, asked: dict[str, object], _: object, words: list[str], folder: Path) -> Job:
        assert asked["nodes"] == 2
        self.submitted.append(words)
        return Job(id="3", folder=folder)

    def state(self, job: str) -> JobState | None:
        assert job == "3"
        if self.logged:
            with self._log.open("a") as file:
                file.write(self.logged.pop(0))
        state = self.states.pop(0)
        if isinstance(state, BaseException):
            raise state
        return state

    def cancel(self, job: str) -> str | None:
        self.cancelled.append(job)
        return self.complaint


@pytest.fixture
def command(tmp_path: Path) -> RemoteCommand:
    folder = tmp_path / "run"
    options = ("--out", str(folder))
    return RemoteCommand(verb="run", experiment="name: e\n", options=options, folder=folder)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch, command: RemoteCommand) -> Iterator[FakeScheduler]:
    """There is no waiting between looks."""
    fake = FakeScheduler(command.folder)
    waiting = {"LOOK_SECONDS": 0.0, "ASK_SECONDS": (0.0, 0.0), "LATE_SECONDS": 0.0}
    done = {"submit": fake.submit, "cancel": fake.cancel, "job_state": fake.state}
    for name, value in {**waiting, **done}.items():
        monkeypatch.setattr(slurm_job, name, value)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    yield fake
    assert fake.states == []


def do(command: RemoteCommand, told: list[str] | None = None) -> int | None:
    asked = request(TRIALS, (told if told is not None else []).append)
    return slurm.delegate(SlurmOptions(), asked, command)


def test_job_to_its_end_tells_changes_once_and_prints_whole_lines(
    scheduler: FakeScheduler, command: RemoteCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = parse_job("JobState=FAILED ExitCode=1:0 BatchHost=node1")
    scheduler.states = [PENDING, PENDING, None, RUNNING, RUNNING, failed]
    hidden = "submitit INFO (x) - starting\n"
    scheduler.logged = ["", "", "", f"{hidden}one\nhal", "f\n", "last"]
    told: list[str] = []
    assert do(command, told) == 1, "the command's own exit code"
    facts = [
        "submitted as job 3",
        "PENDING (Resources)",
        "does not answer",
        "RUNNING on node[1-2]",
        "FAILED",
    ]
    for fact, line in zip(facts, told, strict=True):
        assert fact in line
    assert capsys.readouterr().out == "one\nhalf\nlast\n"
    ((verb, file, *rest),) = scheduler.submitted
    assert (verb, Path(file).read_text(), rest) == ("run", "name: e\n", [*command.options])
    assert (command.folder / "trials").is_dir(), "so that the command takes the folder for a run's"


@pytest.mark.parametrize(
    ("states", "seen", "error", "said"),
    [
        ([TIMEOUT], True, JobEndedError, r"job 3 ended as TIMEOUT on node\[1-2\]; its log is /"),
        ([RUNNING, RUNNING, UNSEEN], False, InputError, "--out must be in a folder that this host"),
    ],
    ids=["time is over", "log on other files"],
)
def test_job_ended_from_outside(
    *,
    scheduler: FakeScheduler,
    command: RemoteCommand,
    states: list[JobState],
    seen: bool,
    error: type[Exception],
    said: str,
) -> None:
    if not seen:
        scheduler.logged = []
    scheduler.states = [*states]
    with pytest.raises(error, match=said):
        do(command)


def test_interrupt_cancels_the_job(scheduler: FakeScheduler, command: RemoteCommand) -> None:
    scheduler.states = [RUNNING, KeyboardInterrupt(), RUNNING, CANCELLED]
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        do(command, told)
    assert scheduler.cancelled == ["3"]
    assert "job 3 is being cancelled" in told
    assert told[-1].startswith("job 3 ended as CANCELLED on node[1-2]")


def test_job_under_way_is_followed_and_not_doubled(
    scheduler: FakeScheduler, command: RemoteCommand
) -> None:
    scheduler.states, told = [KeyboardInterrupt()], list[str]()
    scheduler.complaint = "not yours"
    with pytest.raises(KeyboardInterrupt):
        do(command, told)
    assert "cannot be cancelled: not yours" in told.pop()
    other = replace(command, experiment="name: f\n")
    scheduler.states = [RUNNING]
    with pytest.raises(InputError, match="job 3 is still at work there"):
        do(other)
    scheduler.states = [RUNNING, COMPLETED]
    told.clear()
    assert do(command, told) == 0
    assert "following it" in told[0]
    assert len(scheduler.submitted) == 1
    scheduler.states = [COMPLETED, COMPLETED]
    assert do(other) == 0
    assert len(scheduler.submitted) == 2


@pytest.mark.usefixtures("inside")
def test_other_tasks_of_a_step_leave_the_run_to_the_first(
    command: RemoteCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`srun shardmark run ...` in a script starts the command on every node."""
    assert do(command) is None
    monkeypatch.setenv("SLURM_PROCID", "1")
    told: list[str] = []
    assert do(command, told) == 0
    assert "nothing to do" in told[0]


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
        monkeypatch.delenv(name)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=said):
        slurm.build(SlurmOptions(), REQUEST)


@pytest.mark.usefixtures("inside")
def test_name_of_the_first_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_name(SlurmOptions()) == "localhost"
    assert own_name(SlurmOptions(host="ib0.node1")) == "ib0.node1"
    monkeypatch.setenv("SLURMD_NODENAME", "nowhere.invalid")
    monkeypatch.setattr("platform.node", lambda: "none.invalid")
    with pytest.raises(InputError, match=r"engine\.host: missing, and nowhere\.invalid and none"):
        own_name(SlurmOptions())


def test_words_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    image = "nvcr.io#nvidia/pytorch:26.09-py3"
    options = SlurmOptions(
        gpus_per_node=4, srun=("--mpi=none",), container=image, container_mounts=("/d:/d",)
    )
    words = step_words(options, 2, KEY, title="t", host="node1", port=9)
    assert words[:4] == ["srun", "--job-name=t", "--nodes=2", "--ntasks=2"]
    assert {
        *("--ntasks-per-node=1", "--overlap", "--gpus-per-node=4", "--mpi=none"),
        f"--container-image={image}",
        f"--container-mounts={tmp_path}:{tmp_path},/d:/d",
        f"--container-workdir={tmp_path}",
    } <= {*words}
    *start, invitation = words[words.index("-P") - 1 :]
    assert start == ["python3", "-P", "-m", "shardmark.launch.nodes.node"]
    told = {"host": "node1", "port": 9, "number_variable": "SLURM_PROCID", "with_files": True}
    assert told.items() <= json.loads(invitation).items()
    wrapped = SlurmOptions(python="apptainer exec --nv image.sif python")
    words = step_words(wrapped, 1, {}, title="t", host="h", port=9)
    assert " apptainer exec --nv image.sif python -P -m " in " ".join(words)


@pytest.mark.parametrize("state", ["RUNNING", "CANCELLED", None])
def test_job_that_is_being_ended_is_known_as_such(
    state: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that does not answer says nothing against the ranks' failing by themselves."""
    monkeypatch.setattr(slurm, "NOTICE_SECONDS", 0.01)
    monkeypatch.setattr(
        slurm, "job_state", lambda _: None if state is None else JobState(state=state)
    )
    assert Steps(SlurmOptions(), KEY, "7").is_ending() == (state == "CANCELLED")
