"""Runs a script on N ranks and again in one process with the same data, and compares both.

Importing this module imports no torch: the ranks start to load it at the same time.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardmark.base.errors import InputError
from shardmark.base.evidence.accepted import ACCEPTABLE, USUAL
from shardmark.base.files.scratch import scratch_folder
from shardmark.base.text import counted
from shardmark.scripts.command import ScriptCommand
from shardmark.scripts.launch import Start, launch, starter
from shardmark.scripts.recording import LONGEST_SECONDS, STEPS, Plan

if TYPE_CHECKING:
    from shardmark.audit.audit import AuditReport

Progress = Callable[[str], None]
"""Called with a description of each phase as it begins."""


def audit_script(
    command: ScriptCommand,
    *,
    ranks: int,
    steps: int = STEPS,
    until_epoch: bool = False,
    deterministic: bool = False,
    accept: Collection[str] = USUAL,
    longest_seconds: float = LONGEST_SECONDS,
    writes_are_fine: bool = False,
    progress: Progress = lambda _: None,
    start: Start | None = None,
    against: Against | None = None,
    revision: str = "",
    interventions: str = "",
) -> AuditReport:
    """Record the script's first steps on a number of ranks, replay them, and compare.

    `until_epoch` skips the steps before the last window of the first epoch.
    `accept` names causes of `ACCEPTABLE` that are no fault here.  With `writes_are_fine`, the
    script writes to the user's files.  With `against`, the script takes the steps of another one,
    and is compared with it.  `revision` is a commit of the repository, in which the script runs,
    `interventions` is what is changed in its ranks.
    Raises `InputError` if a script fails, takes no optimizer step that
    can be seen, or if the user's files cannot be protected.
    """
    unknown = sorted(set(accept) - set(ACCEPTABLE))
    if unknown:
        allowed = f"allowed are {', '.join(ACCEPTABLE)}; any other cause has to be mended"
        raise InputError("--accept", f"found {unknown[0]!r}", allowed)
    if ranks < 2 and against is None:
        raise InputError("--ranks", str(ranks), "at least 2 ranks, to compare with one process")
    if against is not None and until_epoch:
        raise InputError("--until-epoch", "--against", "one of both")
    if against is not None and against.revision and writes_are_fine:
        allowed = "leave --writes-are-fine out: the revision is checked out in a private copy"
        raise InputError("--against-revision", against.revision, allowed)
    with scratch_folder() as folder, starter(folder, writes_are_fine=writes_are_fine) as default:
        plan = Plan(
            directory=str(folder / "record"), steps=steps, until_epoch=until_epoch,
            deterministic=deterministic, revision=revision, interventions=interventions,
        )  # fmt: skip
        sides = [(command, ranks, plan)]
        if against is not None:
            directory = str(folder / "against")
            reference = replace(
                plan, directory=directory, revision=against.revision, interventions=""
            )
            sides = [(against.command, against.ranks, reference), *sides]
        for script, count, _ in sides:
            progress(f"{script.text} on {counted(count, 'rank')}: {counted(steps, 'step')}")
        start = start or default
        recordings = [launch(start, *side) for side in sides]
        try:
            from shardmark.audit.audit import Runs, judge_script  # imports torch while the ranks do

            runs = [
                Runs(
                    command=script, ranks=count, recording=its_plan, start=start, accept=accept,
                    seconds=longest_seconds, progress=progress,
                )
                for script, count, its_plan in sides
            ]  # fmt: skip
            if against is None:
                return judge_script(runs[0], recordings[0])
            from shardmark.audit.referee import judge_scripts

            return judge_scripts(runs[0], runs[1], recordings)
        finally:
            for recording in recordings:
                recording.end()


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """The script that another one is compared with."""

    command: ScriptCommand
    ranks: int
    revision: str = ""
    """Commit of the repository that the script is taken from; empty for the working folder."""


def commit_of(revision: str) -> str:
    """The hash of a commit of this folder's repository.  Raises `InputError` without one."""
    words = ["git", "rev-parse", "--quiet", "--verify", f"{revision}^{{commit}}"]
    try:
        process = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise InputError("--against-revision", revision, "install git") from None
    if process.returncode:
        allowed = "a commit, branch or tag of the git repository of this folder"
        raise InputError("--against-revision", revision, allowed)
    return process.stdout.strip()
