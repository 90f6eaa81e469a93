"""Runs a script on N ranks and again in one process with the same data, and compares both.

Importing this module imports no torch: the ranks start to load it at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from shardmark.base.errors import InputError
from shardmark.base.evidence.accepted import ACCEPTABLE, USUAL
from shardmark.base.files.scratch import scratch_folder
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
    deterministic: bool = False,
    accept: Collection[str] = USUAL,
    longest_seconds: float = LONGEST_SECONDS,
    writes_are_fine: bool = False,
    progress: Progress = lambda _: None,
    start: Start | None = None,
) -> AuditReport:
    """Record the script's first steps on a number of ranks, replay them, and compare.

    `accept` names causes of `ACCEPTABLE` that are no fault here.  With `writes_are_fine`, the
    script writes to the user's files.  Raises `InputError` if the script fails, takes no optimizer
    step that can be seen, or if the user's files cannot be protected.
    """
    unknown = sorted(set(accept) - set(ACCEPTABLE))
    if unknown:
        allowed = f"allowed are {', '.join(ACCEPTABLE)}; any other cause has to be mended"
        raise InputError("--accept", f"found {unknown[0]!r}", allowed)
    if ranks < 2:
        raise InputError("--ranks", str(ranks), "at least 2 ranks, to compare with one process")
    with scratch_folder() as folder, starter(folder, writes_are_fine=writes_are_fine) as default:
        start = start or default
        plan = Plan(directory=str(folder / "record"), steps=steps, deterministic=deterministic)
        progress(f"{ranks} ranks take {steps} steps")
        recording = launch(start, command, ranks, plan)
        try:
            from shardmark.audit.audit import Runs, judge_script  # imports torch while the ranks do

            runs = Runs(
                command=command,
                ranks=ranks,
                recording=plan,
                start=start,
                seconds=longest_seconds,
                accept=accept,
                progress=progress,
            )
            return judge_script(runs, recording)
        finally:
            recording.end()
