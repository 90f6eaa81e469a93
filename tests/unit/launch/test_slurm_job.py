"""A command as a job: what is asked of `sbatch`, what is told of the job, and how it ends."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from shardmark.config.engines import SlurmOptions
from shardmark.core.errors import InputError
from shardmark.launch.engine import Errand
from shardmark.launch.slurm import engine as slurm
from shardmark.launch.slurm import follow as slurm_follow
from shardmark.launch.slurm import job as slurm_job
from shardmark.launch.slurm import state as slurm_state
from shardmark.launch.slurm.follow import Echo, follow
from shardmark.launch.slurm.job import JobEndedError, parameters
from shardmark.launch.slurm.options import flags, sbatch_options
from shardmark.launch.slurm.state import JobState, job_state, parse_job, steps_named

SIZE = slurm.Size(nodes=2, name="e")
RUNNING = JobState(state="RUNNING", nodes="node[1-2]", first_node="node1")
COMPLETED = JobState(state="COMPLETED", exit_code=0, nodes="node[1-2]", first_node="node1")
TIMEOUT = JobState(state="TIMEOUT", exit_code=0, nodes="node[1-2]", first_node="node1")

SHOWN = (
    "JobId=3 JobName=shardmark-nodes UserId=root(0) JobState=PENDING Reason=Resources "
    "Requeue=1 ExitCode=0:0 NodeList=(null) NumNodes=2 Power="
)
ENDED = "JobState=CANCELLED Reason=None ExitCode=0:15 NodeList=node[1-2] BatchHost=node1"


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
        partition="gpu",
        time="90",
        mem=0,
        gpus_per_node=4,
        exclusive=False,
        sbatch={"no-kill": True, "reservation": "next friday", "requeue": False},
    )
    assert flags(sbatch_options(options, 2, "e")) == [
        *("--job-name=shardmark-e", "--nodes=2", "--ntasks-per-node=1", "--partition=gpu"),
        *("--time=90", "--gpus-per-node=4", "--mem=0", "--no-kill"),
        "--reservation='next friday'",
    ]
    assert SlurmOptions(time="1-02:00:00").time == "1-02:00:00"


def test_submitit_asks_for_the_same_and_for_nothing_else(tmp_path: Path) -> None:
    submitit = pytest.importorskip("submitit")
    from submitit.slurm.slurm import _make_sbatch_string

    assert submitit.SlurmExecutor is not None
    options = SlurmOptions(
        partition="gpu", time="2:00:00", sbatch={"no-kill": True}, setup=("module load x",)
    )
    asked = sbatch_options(options, 2, "e")
    script = _make_sbatch_string(
        "exec python", tmp_path, **parameters(asked), setup=[*options.setup]
    )
    lines = script.splitlines()
    begun = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    logs = {line for line in begun if line.startswith(("--output", "--error", "--open-mode"))}
    assert len(logs) == 3
    assert begun - logs == {*flags(asked), "--signal=B:CONT@1"}
    assert lines.index("module load x") < lines.index("exec python")


def test_state_of_a_job() -> None:
    waiting = parse_job(SHOWN)
    assert (waiting.state, waiting.reason, waiting.nodes) == ("PENDING", "Resources", None)
    assert waiting.is_alive
    assert str(waiting) == "PENDING (Resources)"
    ended = parse_job(ENDED)
    assert not ended.is_alive
    assert not ended.ended_itself
    assert (ended.exit_code, ended.signal, ended.first_node) == (None, 15, "node1")
    assert str(ended) == "CANCELLED on node[1-2]"
    assert parse_job("JobState=FAILED ExitCode=2:0").ended_itself


def answers(monkeypatch: pytest.MonkeyPatch, **found: tuple[int, str, str]) -> None:
    """What SLURM's commands say, by name."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        code, out, err = found[words[0]]
        return subprocess.CompletedProcess(words, code, out, err)

    monkeypatch.setattr(slurm_state, "_run", run)


def test_job_that_the_scheduler_has_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten = (1, "", "slurm_load_jobs error: Invalid job id specified\n")
    answers(monkeypatch, scontrol=forgotten, sacct=(0, "CANCELLED by 0|0:15\n", ""))
    known = job_state("3")
    assert known is not None
    assert (known.state, known.signal) == ("CANCELLED", 15)
    answers(monkeypatch, scontrol=forgotten, sacct=(1, "", "accounting storage is disabled"))
    assert job_state("3") == JobState(state="UNKNOWN")
    answers(monkeypatch, scontrol=(1, "", "Unable to contact slurm controller"))
    assert job_state("3") is None, "it may be back"


def test_steps_by_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, squeue=(0, "3.0|a\n3.1|b\n3.batch|batch\n", ""))
    assert steps_named("3", "b") == ["3.1"]


def test_scancel_that_complains(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, scancel=(1, "", "scancel: error: Kill job error\n"))
    assert slurm_state.cancel("3") == "scancel: error: Kill job error"
    answers(monkeypatch, scancel=(0, "", ""))
    assert slurm_state.cancel("3") is None


def test_host_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="slurm, and scontrol cannot be run"):
        job_state("3")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting between looks."""
    monkeypatch.setattr(slurm_follow, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(slurm_follow, "ASK_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(slurm_follow, "LATE_SECONDS", 0.0)


@pytest.mark.usefixtures("quick")
def test_following_tells_changes_once_and_prints_whole_lines(tmp_path: Path) -> None:
    log, printed, told = tmp_path / "log", io.StringIO(), list[str]()
    states = iter([parse_job(SHOWN), parse_job(SHOWN), None, RUNNING, RUNNING, COMPLETED])
    texts = iter(["", "", "", "submitit INFO (x) - starting\none\nhal", "f\n", "last"])
    shown: list[str] = []

    def ask(job: str) -> JobState | None:
        assert job == "3"
        with log.open("a") as file:
            file.write(next(texts))
        shown.append(printed.getvalue())
        return next(states)

    assert follow("3", Echo({log: printed}), told.append, ask=ask) is COMPLETED
    assert told == [
        "job 3: PENDING (Resources)",
        "job 3: SLURM's scheduler does not answer; asking again",
        "job 3: RUNNING on node[1-2]",
    ]
    assert shown[-2:] == ["one\n", "one\nhalf\n"]
    assert printed.getvalue() == "one\nhalf\nlast\n"


@pytest.mark.usefixtures("quick")
def test_log_that_cannot_be_seen_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_follow, "LOG_SECONDS", -1.0)
    told: list[str] = []
    states = iter([RUNNING, RUNNING, COMPLETED])
    follow("3", Echo({tmp_path / "none": sys.stdout}), told.append, ask=lambda _: next(states))
    assert told[1:] == [
        "job 3: its log, written on node1, is not to be seen here: is the folder shared?"
    ]


@pytest.fixture
def errand(tmp_path: Path) -> Errand:
    folder = tmp_path / "run"
    options = ("--out", str(folder))
    return Errand(verb="run", experiment="name: e\n", options=options, folder=folder)


class FakeScheduler:
    """Has one job, whose states come one after another."""

    def __init__(self) -> None:
        self.states: list[JobState | BaseException] = []
        self.submitted: list[list[str]] = []
        self.cancelled: list[str] = []
        self.log = True
        self.complaint: str | None = None

    def submit(
        self, asked: dict[str, object], setup: tuple[str, ...], words: list[str], folder: Path
    ) -> slurm_job.Job:
        assert (asked["nodes"], setup) == (2, ())
        self.submitted.append(words)
        job = slurm_job.Job(id="3", folder=folder)
        slurm_job.note_job(job, words)
        if self.log:
            job.output.write_text("measured\n")
        return job

    def state(self, job: str) -> JobState:
        assert job == "3"
        found = self.states.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found

    def cancel(self, job: str) -> str | None:
        self.cancelled.append(job)
        return self.complaint


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch, quick: None) -> Iterator[FakeScheduler]:
    del quick
    fake = FakeScheduler()
    monkeypatch.setattr(slurm_job, "submit", fake.submit)
    monkeypatch.setattr(slurm_job, "cancel", fake.cancel)
    monkeypatch.setattr(slurm_job, "job_state", fake.state)
    monkeypatch.setattr(slurm_follow, "job_state", fake.state)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    yield fake
    assert fake.states == []


def do(errand: Errand, told: list[str] | None = None) -> int | None:
    return slurm.do_elsewhere(
        SlurmOptions(), SIZE, errand, (told if told is not None else []).append
    )


def test_job_to_its_end(
    scheduler: FakeScheduler, errand: Errand, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler.states = [RUNNING, parse_job("JobState=FAILED ExitCode=1:0 BatchHost=node1")]
    told: list[str] = []
    assert do(errand, told) == 1, "the command's own exit code"
    log = errand.folder / "slurm" / "3_0_log.out"
    assert told == [
        f"submitted as job 3; its log is {log}",
        "job 3: RUNNING on node[1-2]",
        f"job 3 ended: FAILED, exit code 1; log: {log}",
    ]
    assert capsys.readouterr().out == "measured\n"
    ((verb, file, *rest),) = scheduler.submitted
    assert (verb, Path(file).read_text(), rest) == ("run", "name: e\n", ["--out", *rest[1:]])
    assert (errand.folder / "trials").is_dir(), "so that the command takes the folder for a run's"


def test_job_ended_from_outside(scheduler: FakeScheduler, errand: Errand) -> None:
    scheduler.states = [TIMEOUT]
    with pytest.raises(JobEndedError, match=r"job 3 ended as TIMEOUT on node\[1-2\]; its log is /"):
        do(errand)


def test_job_without_a_log_was_on_other_files(scheduler: FakeScheduler, errand: Errand) -> None:
    scheduler.states, scheduler.log = [parse_job("JobState=FAILED ExitCode=0:53")], False
    with pytest.raises(InputError, match="--out must be in a folder that this host and the first"):
        do(errand)


def test_interrupt_cancels_the_job(scheduler: FakeScheduler, errand: Errand) -> None:
    scheduler.states = [RUNNING, KeyboardInterrupt(), RUNNING, parse_job(ENDED)]
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        do(errand, told)
    assert scheduler.cancelled == ["3"]
    assert told[2] == "job 3 is being cancelled"
    assert told[-1].startswith("job 3 ended as CANCELLED on node[1-2]; its log is ")


def test_job_under_way_is_followed_and_not_doubled(
    scheduler: FakeScheduler, errand: Errand
) -> None:
    scheduler.states = [KeyboardInterrupt()]
    scheduler.complaint = "not yours"
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        do(errand, told)
    assert told.pop() == "job 3 cannot be cancelled: not yours; try `scancel 3`"
    scheduler.states = [RUNNING, COMPLETED]
    told.clear()
    assert do(errand, told) == 0
    assert len(scheduler.submitted) == 1
    assert told[0] == f"job 3 is at work on {errand.folder} already; following it"


def test_job_under_way_on_something_else(scheduler: FakeScheduler, errand: Errand) -> None:
    scheduler.states = [COMPLETED]
    do(errand)
    other = Errand(verb="run", experiment="name: f\n", options=errand.options, folder=errand.folder)
    scheduler.states = [RUNNING]
    with pytest.raises(InputError, match="job 3 is still at work there"):
        do(other)
    scheduler.states = [COMPLETED, COMPLETED]
    assert do(other) == 0
    assert len(scheduler.submitted) == 2


def test_without_submitit_or_sbatch(
    errand: Errand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "submitit", None)
        with pytest.raises(InputError, match=r"submitit is not installed; pip install 'shardmark"):
            do(errand)
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="slurm, and there is no sbatch here"):
        do(errand)


def test_sbatch_that_refuses(
    errand: Errand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("submitit")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for name in ("sbatch", "srun"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(InputError, match="sbatch refuses the job: error: invalid partition"):
        do(errand)


def test_other_tasks_of_a_step_leave_the_run_to_the_first(
    errand: Errand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`srun shardmark run ...` in a script starts the command on every node."""
    inside = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "node1", "SLURM_PROCID": "1"}
    for name, value in inside.items():
        monkeypatch.setenv(name, value)
    told: list[str] = []
    assert do(errand, told) == 0
    assert told == ["the first task of this step controls the run; this one has nothing to do"]
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert do(errand) is None


def test_shell_of_salloc_goes_to_the_first_node(
    errand: Errand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "srun"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    assert do(errand) == 1
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:4] == ["--overlap", "--nodes=1", "--ntasks=1", "--relative=0"]
    assert words[words.index("-m") :][:3] == ["-m", "shardmark", "run"]
