"""A whole command as one job of SLURM: submitted by submitit, followed to its end, cancelled."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmark.core.errors import InputError, ShardmarkError
from shardmark.launch.engine import Errand, Tell
from shardmark.launch.slurm.follow import Echo, follow
from shardmark.launch.slurm.state import JobState, cancel, job_state
from shardmark.results.files import write_whole
from shardmark.results.store import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator

JOB_FOLDER = "slurm"
JOB_FILE = "job.json"
CANCEL_SECONDS = 90.0
"""For a cancelled job to store the trial under way and to end."""


class JobEndedError(ShardmarkError):
    """A job did not come to its own end: what it was, how it ended, where its log is."""

    def __init__(self, job: str, ended: str, log: str) -> None:
        super().__init__(job, ended, log)  # all positional, so that it can be pickled

    def __str__(self) -> str:
        return "job {} ended as {}; its log is {}".format(*self.args)


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


def do_in_job(
    asked: Mapping[str, str | int], setup: Sequence[str], errand: Errand, tell: Tell
) -> int:
    """Have the command done in a job, and follow it: the command's exit code.

    `asked` are options of `sbatch`, `setup` lines of shell before the command.

    Raises `JobEndedError` where the job was ended from outside, `InputError` where it cannot be
    submitted, `KeyboardInterrupt` once it is cancelled.
    """
    folder = job_folder(errand)
    words = command_words(errand)
    job = _under_way(folder, words, errand)
    if job is not None:
        tell(f"job {job.id} is at work on {errand.folder} already; following it")
    else:
        job = submit(asked, setup, words, folder)
        tell(f"submitted as job {job.id}; its log is {job.output}")
    echo = Echo({job.output: sys.stdout, job.errors: sys.stderr})
    try:
        ended = follow(job.id, echo, tell)
    except KeyboardInterrupt:
        _cancel(job, echo, tell)
        raise
    return _told(job, ended, echo, tell)


def job_folder(errand: Errand) -> Path:
    """For the job's script and log, in the folder of the run."""
    return (errand.folder / JOB_FOLDER).absolute()


def command_words(errand: Errand) -> list[str]:
    """The same command on the experiment as it is now: the file may change while the job waits.

    Raises `InputError` where the run's folder cannot be used.
    """
    RunFolder.create(errand.folder)
    folder = job_folder(errand)
    folder.mkdir(exist_ok=True)
    digest = hashlib.sha256(errand.experiment.encode()).hexdigest()[:12]
    stored = folder / f"experiment-{digest}.yaml"
    write_whole(stored, errand.experiment.encode())
    return [errand.verb, str(stored), *errand.options]


def become(words: Sequence[str]) -> None:
    """What submitit runs: this process is from now on the command, and gets the job's signals."""
    os.execv(sys.executable, [sys.executable, "-m", "shardmark", *words])


def submit(
    asked: Mapping[str, str | int], setup: Sequence[str], words: Sequence[str], folder: Path
) -> Job:
    """Submit the command; raises `InputError` with what SLURM has against it."""
    submitit = _submitit()
    if shutil.which("sbatch") is None:
        raise InputError(
            "engine.name",
            "slurm, and there is no sbatch here",
            "give the command on a host that submits to the cluster, or use another --engine",
        )
    executor = submitit.SlurmExecutor(folder, python=f"exec {shlex.quote(sys.executable)}")
    executor.update_parameters(**parameters(asked), setup=[*setup])
    with _complaints(submitit) as said:
        submitted = executor.submit(become, list(words))
    if said:
        raise InputError("engine", f"sbatch refuses the job: {said[0]}", "see `sinfo`, `sacctmgr`")
    job = Job(id=submitted.job_id, folder=folder)
    note_job(job, words)
    return job


def note_job(job: Job, words: Sequence[str]) -> None:
    """Write down who works on the folder, for a later command."""
    content = json.dumps({"job": job.id, "command": list(words)})
    write_whole(job.folder / JOB_FILE, content.encode())


def parameters(asked: Mapping[str, str | int]) -> dict[str, Any]:
    """For submitit: all as options of `sbatch`, and none of what it would ask by itself.

    Its signal, 90 seconds before the time limit, goes to all steps and would end the ranks.
    """
    rest = {k: True if v == "" else v for k, v in asked.items() if k not in ("nodes", "job-name")}
    return {
        "nodes": asked["nodes"],
        "job_name": asked["job-name"],
        "time": None,
        "wckey": None,
        "use_srun": False,
        "additional_parameters": {"signal": "B:CONT@1", **rest},
    }


def _under_way(folder: Path, words: Sequence[str], errand: Errand) -> Job | None:
    """The job that already works on the folder; raises `InputError` if it does something else."""
    try:
        stored = json.loads((folder / JOB_FILE).read_text())
        job, command = str(stored["job"]), stored["command"]
    except (OSError, ValueError, KeyError):
        return None
    state = job_state(job)
    if state is not None and not state.is_alive:
        return None
    if command != list(words):
        raise InputError(
            str(errand.folder),
            f"job {job} is still at work there ({state or 'SLURM cannot be asked'}), on another "
            "experiment or with other options",
            f"wait for it, `scancel {job}`, or name another --out",
        )
    return Job(id=job, folder=folder)


def _told(job: Job, ended: JobState, echo: Echo, tell: Tell) -> int:
    """The exit code of a job that has ended, which is told; its pickle is of no use any more."""
    for leftover in (*job.folder.glob(f"{job.id}*.pkl"), *job.folder.glob(".submission_file_*")):
        leftover.unlink(missing_ok=True)
    if ended.ended_itself and echo.any_seen:
        assert ended.exit_code is not None
        tell(f"job {job.id} ended: {ended.state}, exit code {ended.exit_code}; log: {job.output}")
        return ended.exit_code
    if not echo.any_seen and ended.state not in ("CANCELLED", "UNKNOWN"):
        raise InputError(
            str(job.folder),
            f"job {job.id} ended as {ended}, and its log is not to be seen here",
            "--out must be in a folder that this host and the first node share, and Python must "
            "be at the same path",
        )
    raise JobEndedError(job.id, str(ended), str(job.output))


def _cancel(job: Job, echo: Echo, tell: Tell) -> None:
    complaint = cancel(job.id)
    if complaint is not None:
        tell(f"job {job.id} cannot be cancelled: {complaint}; try `scancel {job.id}`")
        return
    tell(f"job {job.id} is being cancelled")
    with suppress(TimeoutError):
        ended = follow(job.id, echo, tell, seconds=CANCEL_SECONDS)
        tell(f"job {job.id} ended as {ended}; its log is {job.output}")


def _submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise InputError(
            "engine.name",
            "slurm, and submitit is not installed",
            "pip install 'shardmark[slurm]', or give the command inside an allocation (sbatch)",
        ) from None
    return submitit


@contextmanager
def _complaints(submitit: Any) -> Iterator[list[str]]:
    """What sbatch said, if submitit could not submit; it prints that as well."""
    said: list[str] = []
    printed = StringIO()
    try:
        with redirect_stderr(printed):
            yield said
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
        lines = (printed.getvalue() or str(error)).strip().splitlines()
        said.append(" | ".join(line.removeprefix("sbatch: ").strip() for line in lines[-3:]))
