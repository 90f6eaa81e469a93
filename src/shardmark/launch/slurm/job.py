"""A whole command as one job of SLURM: submitted by submitit, followed to its end, cancelled."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from shardmark.config.engines import SlurmOptions
from shardmark.core.errors import InputError, ShardmarkError
from shardmark.core.run_files import JOB_FOLDER
from shardmark.core.text import say
from shardmark.launch.engine import EngineRequest, RemoteCommand, Tell
from shardmark.results.files import read_regular, write_whole
from shardmark.results.store import RunFolder

JOB_FILE = "job.json"
COMMAND_SECONDS = 60.0
"""For one of SLURM's commands to answer."""
LOOK_SECONDS = 0.5
"""Between two looks at the log."""
ASK_SECONDS = (2.0, 20.0)
"""Between two questions to the scheduler: from that to that, a tenth of the time gone."""
LATE_SECONDS = 10.0
"""For it to be seen after the job's end."""
CANCEL_SECONDS = 90.0
"""For a cancelled job to store the trial under way and to end."""
HIDDEN = ("submitit INFO", "submitit WARNING", "interrupted; go on with:")
"""Lines of the job's that say nothing here, or what this command says itself."""
ALIVE = frozenset(
    {
        *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING"),
        *("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SIGNALING", "STAGE_OUT"),
    }
)
"""States of a job that has not ended, or that is to begin again."""


class JobEndedError(ShardmarkError):
    """A job did not come to its own end: what it was, how it ended, where its log is."""

    def __init__(self, job: str, ended: str, log: str) -> None:
        super().__init__(job, ended, log)  # all positional, so that it can be pickled

    def __str__(self) -> str:
        return "job {} ended as {}; its log is {}".format(*self.args)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """A job as SLURM knows it."""

    state: str
    """`PENDING`, `RUNNING`, `TIMEOUT`, ...; `UNKNOWN` where it does not know the job any more."""
    reason: str | None = None
    """Why it waits, or why it ended."""
    exit_code: int | None = None
    """Of the job's command, where that ended by itself."""
    nodes: str | None = None
    first_node: str | None = None

    @property
    def is_alive(self) -> bool:
        return self.state in ALIVE

    @property
    def ended_itself(self) -> bool:
        """Whether the command came to its end, whatever its exit code."""
        return self.state in ("COMPLETED", "FAILED") and self.exit_code is not None

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.state}{reason}" + (f" on {self.nodes}" if self.nodes else "")


def job_state(job: str) -> JobState | None:
    """The job's state now; None while the scheduler cannot be asked."""
    shown = _slurm("scontrol", "show", "job", "--oneliner", job)
    if shown.returncode == 0:
        return parse_job(shown.stdout)
    if "Invalid job id" not in shown.stderr:
        return None
    # The scheduler forgets a job minutes after its end; accounting, where there is any, does not.
    words = ("--noheader", "--allocations", "--parsable2", "--format=State,ExitCode")
    accounted = _slurm("sacct", *words, f"--jobs={job}")
    lines = accounted.stdout.splitlines()
    if accounted.returncode or not lines:
        return JobState(state="UNKNOWN")
    state, _, codes = lines[0].partition("|")
    return parse_job(f"JobState={state.split()[0]} ExitCode={codes}")


def parse_job(text: str) -> JobState:
    """From what `scontrol show job` prints."""
    pairs = re.findall(r"(?:^|\s)([A-Za-z/:]+)=(\S*)", text)
    shown = {name: value for name, value in pairs if value not in ("None", "", "(null)")}
    code, _, signal = shown.get("ExitCode", "").partition(":")
    return JobState(
        state=shown.get("JobState", "UNKNOWN"),
        reason=shown.get("Reason"),
        exit_code=int(code) if code.isdecimal() and signal in ("0", "") else None,
        nodes=shown.get("NodeList"),
        first_node=shown.get("BatchHost"),
    )


def cancel(job: str) -> str | None:
    """End the job; what SLURM complains of, if anything."""
    done = _slurm("scancel", job)
    return done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else None


def sbatch_options(options: SlurmOptions, request: EngineRequest) -> dict[str, Any]:
    """The job's options by their long names; True for one that takes no value."""
    asked = {
        "job-name": f"shardmark-{request.name}",
        "nodes": request.nodes,
        "ntasks-per-node": 1,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time,
        "constraint": options.constraint,
        "gpus-per-node": options.gpus_per_node,
        "cpus-per-task": options.cpus_per_task,
        "mem": options.mem,
        "exclusive": options.exclusive,
        **options.sbatch,
    }
    return {k: value for k, value in asked.items() if value is not None and value is not False}


def flags(asked: Mapping[str, Any]) -> list[str]:
    """As they are given to a command."""
    return [
        f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}"
        for name, value in asked.items()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job that was submitted, by this command or by one before it."""

    id: str
    folder: Path

    @property
    def output(self) -> Path:
        return self.folder / f"{self.id}_0_log.out"

    @property
    def errors(self) -> Path:
        return self.folder / f"{self.id}_0_log.err"


def run_in_job(options: SlurmOptions, request: EngineRequest, command: RemoteCommand) -> int:
    """Have the command done in a job, and follow it: the command's exit code.

    Raises `JobEndedError` where the job was ended from outside, `InputError` where it cannot be
    submitted, `KeyboardInterrupt` once it is cancelled.
    """
    tell = request.tell
    words = command_words(command)
    job = _under_way(command, words)
    if job is not None:
        tell(f"job {job.id} is at work on {command.folder} already; following it")
    else:
        asked = sbatch_options(options, request)
        job = submit(asked, options.setup, words, _job_folder(command))
        content = json.dumps({"job": job.id, "command": words})
        write_whole(job.folder / JOB_FILE, content.encode())
        tell(f"submitted as job {job.id}; its log is {job.output}")
    follower = Follower(job, tell)
    try:
        ended = follower.follow()
    except KeyboardInterrupt:
        complaint = cancel(job.id)
        if complaint is not None:
            tell(f"job {job.id} cannot be cancelled: {complaint}; try `scancel {job.id}`")
            raise
        tell(f"job {job.id} is being cancelled")
        with suppress(TimeoutError):
            ended = follower.follow(CANCEL_SECONDS)
            tell(f"job {job.id} ended as {ended}; its log is {job.output}")
        raise
    return _exit_code(job, ended, tell, log_seen=follower.log_seen)


def _job_folder(command: RemoteCommand) -> Path:
    """For the job's script and log, in the folder of the run."""
    return (command.folder / JOB_FOLDER).absolute()


def command_words(command: RemoteCommand) -> list[str]:
    """The same command on the experiment as it is now: the file may change while the job waits.

    Raises `InputError` where the run's folder cannot be used.
    """
    RunFolder.create(command.folder)
    folder = _job_folder(command)
    folder.mkdir(exist_ok=True)
    digest = hashlib.sha256(command.experiment.encode()).hexdigest()[:12]
    stored = folder / f"experiment-{digest}.yaml"
    write_whole(stored, command.experiment.encode())
    return [command.verb, str(stored), *command.options]


def become(words: Sequence[str]) -> None:
    """What submitit runs: this process is from now on the command, and gets the job's signals."""
    os.execv(sys.executable, [sys.executable, "-P", "-m", "shardmark", *words])


def submit(
    asked: Mapping[str, Any], setup: Sequence[str], words: Sequence[str], folder: Path
) -> Job:
    """Submit the command; raises `InputError` with what SLURM has against it."""
    try:
        import submitit
    except ImportError:
        raise InputError(
            "engine.name",
            "slurm, and submitit is not installed",
            "pip install 'shardmark[slurm]', or give the command inside an allocation (sbatch)",
        ) from None
    if shutil.which("sbatch") is None:
        raise InputError(
            "engine.name",
            "slurm, and there is no sbatch here",
            "give the command on a host that submits to the cluster, or use another --engine",
        )
    executor = submitit.SlurmExecutor(folder, python=f"exec {shlex.quote(sys.executable)}")
    executor.update_parameters(**parameters(asked), setup=[*setup])
    printed = StringIO()
    errors = submitit.core.utils
    try:
        with redirect_stderr(printed):  # submitit prints what sbatch said
            submitted = executor.submit(become, list(words))
    except (errors.FailedJobError, errors.FailedSubmissionError) as error:
        lines = (printed.getvalue() or str(error)).strip().splitlines()[-3:]
        said = " | ".join(line.removeprefix("sbatch: ").strip() for line in lines)
        refused = f"sbatch refuses the job: {said}"
        raise InputError("engine", refused, "see `sinfo`, `sacctmgr`") from None
    return Job(id=submitted.job_id, folder=folder)


def parameters(asked: Mapping[str, Any]) -> dict[str, Any]:
    """For submitit: all as options of `sbatch`, and none of what it would ask by itself.

    Its signal, 90 seconds before the time limit, goes to all steps and would end the ranks.
    """
    rest = {name: v for name, v in asked.items() if name not in ("nodes", "job-name")}
    return {
        "nodes": asked["nodes"],
        "job_name": asked["job-name"],
        "time": None,
        "wckey": None,
        "use_srun": False,
        "additional_parameters": {"signal": "B:CONT@1", **rest},
    }


def _under_way(command: RemoteCommand, words: Sequence[str]) -> Job | None:
    """The job that already works on the folder; raises `InputError` if it does something else."""
    folder = _job_folder(command)
    try:
        stored = json.loads(read_regular(folder / JOB_FILE))
        job, before = str(stored["job"]), stored["command"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    state = job_state(job)
    if state is not None and not state.is_alive:
        return None
    if before != list(words):
        raise InputError(
            str(command.folder),
            f"job {job} is still at work there ({state or 'SLURM cannot be asked'}), on another "
            "experiment or with other options",
            f"wait for it, `scancel {job}`, or name another --out",
        )
    return Job(id=job, folder=folder)


class Follower:
    """Prints what a job prints and tells what SLURM says of it, until its end."""

    def __init__(self, job: Job, tell: Tell) -> None:
        self._job = job
        self._tell = tell
        self._told = ""
        self._read_bytes = {job.output: 0, job.errors: 0}

    @property
    def log_seen(self) -> bool:
        return any(path.exists() for path in self._read_bytes)

    def follow(self, seconds: float | None = None) -> JobState:
        """How the job ended.  Raises `TimeoutError` after so many seconds, if they are given."""
        started = due = time.monotonic()
        while True:
            self._print_new()
            now = time.monotonic()
            if now >= due:
                state = job_state(self._job.id)
                least, most = ASK_SECONDS
                due = now + min(most, max(least, (now - started) / 10))
                if state is not None and not state.is_alive:
                    self._print_late(state)
                    return state
                text = "SLURM's scheduler does not answer" if state is None else str(state)
                if text != self._told:
                    self._told = text
                    self._tell(f"job {self._job.id}: {text}")
            if seconds is not None and now - started > seconds:
                raise TimeoutError(self._job.id)
            time.sleep(LOOK_SECONDS)

    def _print_late(self, ended: JobState) -> None:
        """What came late; a file system may show the log of a job only after its end."""
        deadline = time.monotonic() + (LATE_SECONDS if ended.first_node is not None else 0.0)
        while not self.log_seen and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            self._print_new()
        self._print_new(last=True)

    def _print_new(self, *, last: bool = False) -> None:
        """Whole lines that are new at the end of the logs; at last one without an end, too."""
        for path in self._read_bytes:
            with suppress(OSError):
                # Network file systems show what is new once the folder is opened anew.
                os.listdir(path.parent)  # noqa: PTH208  # nothing is made of the entries
                with path.open("rb") as file:
                    file.seek(self._read_bytes[path])
                    content = file.read()
                whole = len(content) if last else content.rfind(b"\n") + 1
                self._read_bytes[path] += whole
                for line in content[:whole].decode(errors="replace").splitlines():
                    if not line.startswith(HIDDEN):
                        say(line, error=path == self._job.errors)


def _exit_code(job: Job, ended: JobState, tell: Tell, *, log_seen: bool) -> int:
    """Of a job that has ended, which is told; its pickle is of no use any more."""
    for leftover in (*job.folder.glob(f"{job.id}*.pkl"), *job.folder.glob(".submission_file_*")):
        leftover.unlink(missing_ok=True)
    if ended.ended_itself and log_seen:
        assert ended.exit_code is not None
        tell(f"job {job.id} ended: {ended.state}, exit code {ended.exit_code}; log: {job.output}")
        return ended.exit_code
    if not log_seen and ended.state not in ("CANCELLED", "UNKNOWN"):
        raise InputError(
            str(job.folder),
            f"job {job.id} ended as {ended}, and its log is not to be seen here",
            "--out must be in a folder that this host and the first node share, and Python must "
            "be at the same path",
        )
    raise JobEndedError(job.id, str(ended), str(job.output))


def _slurm(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_SECONDS,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's Ctrl-C is for us alone
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", f"no answer in {COMMAND_SECONDS:g} s")
    except OSError as error:
        raise InputError(
            "engine.name",
            f"slurm, and {words[0]} cannot be run: {error.strerror or error}",
            "give the command on a host of the cluster, or use another --engine",
        ) from None
