"""What SLURM says of a job, by its own commands."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

from shardmark.core.errors import InputError

COMMAND_SECONDS = 60.0
ALIVE = frozenset(
    {
        *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING"),
        *("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SIGNALING", "STAGE_OUT"),
    }
)
"""States of a job that has not ended, or that is to begin again."""
AT_WORK = frozenset({"RUNNING", "SUSPENDED", "STOPPED", "SIGNALING"})
NO_REASONS = ("None", "", "(null)")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """A job as SLURM knows it."""

    state: str
    """`PENDING`, `RUNNING`, `TIMEOUT`, ...; `UNKNOWN` where it does not know the job any more."""
    reason: str | None = None
    """Why it waits, or why it ended."""
    exit_code: int | None = None
    """Of the job's command, where that ended by itself."""
    signal: int = 0
    """That ended the command."""
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
    shown = _run("scontrol", "show", "job", "--oneliner", job)
    if shown.returncode == 0:
        return parse_job(shown.stdout)
    if "Invalid job id" not in shown.stderr:
        return None
    # The scheduler forgets a job minutes after its end; accounting, where there is any, does not.
    told = _run(
        *("sacct", "--noheader", "--allocations", "--parsable2"),
        *("--format=State,ExitCode", f"--jobs={job}"),
    )
    lines = told.stdout.splitlines()
    if told.returncode or not lines:
        return JobState(state="UNKNOWN")
    state, _, codes = lines[0].partition("|")
    return parse_job(f"JobState={state.split()[0]} ExitCode={codes}")


def parse_job(text: str) -> JobState:
    """From what `scontrol show job` prints."""
    found = dict(re.findall(r"(?:^|\s)([A-Za-z/:]+)=(\S*)", text))
    state = found.get("JobState", "UNKNOWN")
    code, _, signal = found.get("ExitCode", "").partition(":")
    own = code.isdecimal() and signal in ("0", "")
    return JobState(
        state=state,
        reason=_named(found.get("Reason", "")),
        exit_code=int(code) if own else None,
        signal=int(signal) if signal.isdecimal() else 0,
        nodes=_named(found.get("NodeList", "")),
        first_node=_named(found.get("BatchHost", "")),
    )


def cancel(job: str) -> str | None:
    """End the job, or the step `JOB.STEP`; what SLURM complains of, if anything."""
    done = _run("scancel", job)
    return done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else None


def steps_named(job: str, name: str) -> list[str]:
    """The job's steps of that name that have not ended, as `JOB.STEP`."""
    shown = _run("squeue", "--steps", f"--jobs={job}", "--noheader", "--format=%i|%j")
    pairs = [line.strip().split("|", 1) for line in shown.stdout.splitlines() if "|" in line]
    return [step for step, found in pairs if found == name]


def _named(text: str) -> str | None:
    return None if text in NO_REASONS else text


def _run(*words: str) -> subprocess.CompletedProcess[str]:
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
