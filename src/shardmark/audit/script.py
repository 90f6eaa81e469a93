"""Runs a script on N ranks and again in one process with the same data, and compares both.

Importing this module imports no torch: the ranks start to load it at the same time.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmark.base.accepted import ACCEPTABLE, USUAL
from shardmark.base.errors import InputError
from shardmark.base.scratch import scratch_folder
from shardmark.scripts.command import ScriptCommand, check_exists, free_port, hooked_environment
from shardmark.scripts.recording import LONGEST_SECONDS, PROCESS_FILE, STEPS, Plan
from shardmark.scripts.start import TRACKERS_OFF, Protection, Started, start_fork, start_words

if TYPE_CHECKING:
    from shardmark.audit.audit import AuditReport

HOOKS = "shardmark.scripts.hooks:install"
FORWARDED_OPTIONS = {"-u", "-P"}
"""Options of Python that a process forked from this one can do without, or has."""

Start = Callable[[ScriptCommand, int, Plan, Path], Started]
"""Starts the script on a number of ranks with a plan; its output goes to the file."""
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
    with scratch_folder() as folder, _starter(folder, writes_are_fine=writes_are_fine) as default:
        start = start or default
        plan = Plan(directory=str(folder / "record"), steps=steps, deterministic=deterministic)
        progress(f"{ranks} ranks take {steps} steps")
        recording = launch(start, command, ranks, plan)
        try:
            from shardmark.audit.audit import judge_script  # imports torch while the ranks do

            return judge_script(
                command,
                recording,
                ranks=ranks,
                plan=plan,
                start=start,
                seconds=longest_seconds,
                accept=accept,
                progress=progress,
            )
        finally:
            recording.end()


def launch(start: Start, command: ScriptCommand, ranks: int, plan: Plan) -> Started:
    """Start the script with the plan, whose folder is made."""
    folder = Path(plan.directory)
    folder.mkdir(parents=True)
    return start(command, ranks, plan, folder / "log.txt")


@contextmanager
def _starter(folder: Path, *, writes_are_fine: bool) -> Iterator[Start]:
    """Give a function that starts scripts, whose records are below `folder`."""
    with ExitStack() as stack:
        layers = None
        if not writes_are_fine:
            layers = stack.enter_context(scratch_folder(away_from=Path.cwd()))
        owned = tuple(str(path) for path in (folder, layers) if path is not None)

        def start(command: ScriptCommand, ranks: int, plan: Plan, log: Path) -> Started:
            """Start the script by its launcher, or replay it in a fork of this process.

            Raises `InputError` if a file is missing.
            """
            check_exists(command)
            records = Path(plan.directory)
            upper = None if layers is None else layers / records.name
            if upper is not None:
                upper.mkdir()
            protection = Protection(
                folder=str(folder),
                records=str(records),
                upper=None if upper is None else str(upper),
                owned=owned,
            )
            process = RankProcess.recorded(plan) if ranks == 1 else None
            if process is not None and process.can_be_forked:
                return start_fork(partial(process.run_alone, plan), log, protection)
            variables = {**TRACKERS_OFF, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
            environment = hooked_environment(HOOKS, {**variables, **plan.variables()})
            return start_words(command.with_ranks(ranks), environment, log, protection)

        yield start


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """The interpreter of a recorded rank, as it was before the script began."""

    words: tuple[str, ...]
    """The interpreter, its options, and the script with its arguments."""
    prefix: str
    path: tuple[str, ...]
    """Python's search path, without the script's folder."""
    environment: dict[str, str]
    folder: str

    @classmethod
    def recorded(cls, plan: Plan) -> RankProcess | None:
        """Return the process of rank 0; None if it was not recorded."""
        path = Path(plan.recorded or "") / PROCESS_FILE
        if plan.recorded is None or not path.is_file():
            return None
        facts: dict[str, Any] = json.loads(path.read_text())
        return cls(**facts | {key: tuple(facts[key]) for key in ("words", "path")})

    @property
    def can_be_forked(self) -> bool:
        """True if a fork of this process can do what the rank's interpreter does."""
        options, script = self._split()
        return (
            threading.active_count() == 1
            and self.prefix == sys.prefix
            and set(options) <= FORWARDED_OPTIONS
            and bool(script)
            and not self._shadowed()
        )

    def _split(self) -> tuple[list[str], list[str]]:
        """Return the interpreter's options, and the script, or `-m` and a module, behind them."""
        for number, word in enumerate(self.words[1:], 1):
            if word == "-m" or not word.startswith("-"):
                return [*self.words[1:number]], [*self.words[number:]]
        return [*self.words[1:]], []

    def _shadowed(self) -> bool:
        """Return True if a file of the script replaces a module that this process has imported."""
        _, script = self._split()
        folder = Path(self.folder)
        place = folder if script[0] == "-m" else (folder / script[0]).resolve().parent
        names = {path.stem if path.suffix == ".py" else path.name for path in place.glob("*")}
        imported = {name for name in sys.modules if "." not in name}
        return bool((names - {"shardmark"}) & imported)

    def run_alone(self, plan: Plan) -> None:
        """Run the script as the only rank, in a forked process that has imported torch."""
        import random

        import numpy as np
        import torch

        _, script = self._split()
        port = str(free_port())
        os.environ.clear()
        os.environ.update(self.environment)
        for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"):
            os.environ[name] = "0"
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"):
            os.environ[name] = "1"
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **plan.variables())
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # no launcher listens
        os.chdir(self.folder)
        time.tzset()
        random.seed()
        np.random.seed()
        torch.set_num_threads(1)
        sys.path[:] = self.path
        from shardmark.scripts.hooks import install

        install()
        if script[0] == "-m":
            sys.argv = script[1:]
            sys.path.insert(0, self.folder)
            runpy.run_module(script[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = script
            sys.path.insert(0, str(Path(script[0]).resolve().parent))
            runpy.run_path(script[0], run_name="__main__")
