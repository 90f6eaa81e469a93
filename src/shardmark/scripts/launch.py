"""Starts of a script with hooks, and the records that its processes write.

Importing this module imports no torch: the ranks start to load it at the same time.
"""

from __future__ import annotations

import errno
import json
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmark.base.errors import InputError
from shardmark.base.files.scratch import scratch_folder
from shardmark.base.text import counted
from shardmark.scripts.command import ScriptCommand, check_exists, free_port, hooked_environment
from shardmark.scripts.recording import PROCESS_FILE, Plan, rank_file
from shardmark.scripts.start import (
    TRACKERS_OFF,
    Protection,
    Started,
    filled_disk,
    start_fork,
    start_words,
)

if TYPE_CHECKING:
    from shardmark.scripts.record import Record

ON_A_CPU = (
    "without a GPU, Accelerate and the Trainer of transformers use several processes only on "
    "request: accelerate launch --cpu, Accelerator(cpu=True), TrainingArguments(use_cpu=True)"
)
HOOKS = "shardmark.scripts.hooks:install"
EXTENSIONS = Path.home() / ".cache" / "torch_extensions"
"""Folder of compiled extensions, as of DeepSpeed.  Where a user has none, the starts of an audit
share one: what a start writes is removed, and each would compile for minutes."""
FORWARDED_OPTIONS = {"-u", "-P"}
"""Options of Python that a process forked from this one can do without, or has."""

Start = Callable[[ScriptCommand, int, Plan, Path], Started]
"""Starts the script on a number of ranks with a plan; its output goes to the file."""


def launch(start: Start, command: ScriptCommand, ranks: int, plan: Plan) -> Started:
    """Start the script with the plan, whose folder is made."""
    folder = Path(plan.directory)
    folder.mkdir(parents=True)
    return start(command, ranks, plan, folder / "log.txt")


@contextmanager
def starter(folder: Path, *, writes_are_fine: bool) -> Iterator[Start]:
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
            upper = None if layers is None else str(layers / Path(plan.directory).name)
            if upper is not None:
                Path(upper).mkdir()
            protection = Protection(
                folder=str(folder), records=plan.directory, upper=upper, owned=owned,
                revision=plan.revision,
            )  # fmt: skip
            forks = ranks == 1 and not plan.guided and not command.names_ranks
            process = RankProcess.recorded(plan) if forks else None
            if process is not None and process.can_be_forked:
                return start_fork(partial(process.run_alone, plan), log, protection)
            variables = {**TRACKERS_OFF, "OMP_NUM_THREADS": "1"}
            compiles = "compile" in plan.interventions
            variables["TORCHDYNAMO_DISABLE"] = str(int(not compiles))  # so hooks see all modules
            if not EXTENSIONS.is_dir() and "TORCH_EXTENSIONS_DIR" not in os.environ:
                variables["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions")
            if command.names_ranks:  # the script may start one for each GPU that it sees
                numbers = ",".join(map(str, range(ranks)))
                devices = os.environ.get("CUDA_VISIBLE_DEVICES", numbers).split(",")[:ranks]
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
            environment = hooked_environment(HOOKS, {**variables, **plan.variables()})
            return start_words(command.with_ranks(ranks), environment, log, protection)

        yield start


def read_records(
    started: Started, plan: Plan, *, ranks: int, seconds: float, place: str = "command"
) -> tuple[list[Record], str]:
    """Wait for a start; return the records of its ranks, and how it failed after some steps.

    Raises `InputError` with the place if a rank takes no optimizer step.
    """
    from shardmark.scripts.record import PARTIAL, Record

    code = started.wait(seconds)
    if code is None:
        raise InputError(
            place,
            f"its {counted(ranks, 'rank')} did not take {counted(plan.steps, 'step')} in "
            f"{seconds:g} s",
            "give --timeout SECONDS if they need longer; its output ends with: " + started.error(),
        )
    folder = Path(plan.directory)
    # A rank that is ended after another one's failure may have emptied its file again.
    is_full = (
        next(folder.glob(f"*{PARTIAL}"), None) is not None
        or filled_disk(folder)
        or os.strerror(errno.ENOSPC) in started.error()
    )
    paths = [rank_file(plan.directory, rank) for rank in range(ranks)]
    records = [Record.load(path) for path in paths if path.is_file()]
    if others := {record.ranks for record in records if record.joined} - {ranks}:
        raise InputError(
            place,
            f"the script trains on {counted(max(others), 'rank')}, and was to on {ranks}",
            "write {ranks} where its command has their number, as in `python train.py -n {ranks}`",
        )
    idle = sorted({*range(ranks)} - {record.rank for record in records if record.steps})
    if idle and is_full:
        raise InputError(
            "TMPDIR",
            "a disk is full: the records, and what the script writes, go to temporary folders "
            f"({folder.parents[1]}, /var/tmp)",
            "set TMPDIR to a folder with room, or let the script write less",
        )
    if idle and not any(record.refusal for record in records):
        ended = f"the script ended with exit code {code}" if code else "the script ended"
        which = f"rank {idle[0]} takes no" if len(idle) < ranks else "no rank takes an"
        raise InputError(
            place,
            f"{which} optimizer step of torch.optim, and {ended}: {started.error()}",
            _remedy_for_idle_ranks(records, ranks, failed=bool(code)),
        )
    if code and any(record.ended_early for record in records):
        count = counted(min(len(record.steps) for record in records), "step")
        return records, f"after {count} the script ends with exit code {code}: {started.error()}"
    return records, ""


def _remedy_for_idle_ranks(records: Sequence[Record], ranks: int, *, failed: bool) -> str:
    if any(record.accelerate_alone for record in records):
        return ON_A_CPU
    passes = max((record.backward_passes for record in records if not record.steps), default=0)
    if passes:
        return (
            f"backward was called {counted(passes, 'time')}: the class of the optimizer must "
            "derive from torch.optim.Optimizer"
        )
    if failed:
        return "mend that error first"
    if ranks == 1:
        return "let it train in one process"
    starts = "a script that starts them itself needs {ranks} in its command for their number"
    return f"each of {ranks} ranks must train; {starts}"


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
