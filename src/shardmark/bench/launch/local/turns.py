"""Runs several trials side by side, in turns: each has an agent, and all but one are stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path

import psutil

from shardmark.base.errors import STORAGE_EXIT, error_kind
from shardmark.base.system.processes import die_with_parent
from shardmark.bench.launch.engine import OUT_OF_REACH
from shardmark.bench.launch.local import agent
from shardmark.bench.launch.trial_artifacts import EXIT_FILE
from shardmark.ranks.measure.step.turns import Turn

TURN_SECONDS = (0.03, 0.07)
"""Range of a turn's length, which is random: a script may do something every so many seconds."""
OWN_FOLDERS = ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Variables with a folder for temporary files, of which each trial has its own."""


def run_agent(directories: str, task: str) -> int:
    """Run an agent for each of the folders (a list in JSON), and write its exit code into it."""
    folders: list[str] = json.loads(directories)
    turns: dict[int, Turn] = {}
    for number, folder in enumerate(folders):
        turn = Turn()
        turns[_fork(folder, task, number, turn)] = turn
    codes = _take_turns(turns)
    if codes is None:
        return OUT_OF_REACH
    for pid, folder in zip(turns, folders, strict=True):
        (Path(folder) / EXIT_FILE).write_text(str(codes[pid]))
    return 0


def _fork(folder: str, task: str, number: int, turn: Turn) -> int:
    """Start a trial's agent in a process group of its own, which one signal can stop."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent(parent)
        for name in OWN_FOLDERS:
            if name in os.environ:
                os.environ[name] = str(Path(os.environ[name], str(number)))
        Path(os.environ["TMPDIR"]).mkdir(parents=True)
        turn.group = os.getpid()
        Turn.current = turn
        code = agent.run_agent(folder, task)
    except BaseException as error:
        code = STORAGE_EXIT if error_kind(error) == "storage" else code
        with suppress(OSError):  # a disk may be full
            traceback.print_exc()  # into the trial's log: `os._exit` prints nothing
    os._exit(code)


def _take_turns(turns: Mapping[int, Turn]) -> dict[int, int] | None:
    """Give turns to trials that stop themselves, until all have ended; return exit codes by pid.

    The first turn begins when all trials have warmed up, which they do at the same time.  Returns
    None for a trial with processes that a stop does not reach.
    """
    codes: dict[int, int] = {}
    stopped: list[int] = []
    ranks: dict[int, list[int]] = {}
    numbers: Counter[int] = Counter()
    while len(codes) < len(turns):
        if len(codes) + len(stopped) == len(turns):
            pid = stopped.pop(0)
            _resume(pid, turns[pid], ranks[pid], numbers[pid])
            numbers[pid] += 1
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            stopped.append(pid)
            if pid in ranks:
                continue
            ranks[pid] = [process.pid for process in psutil.Process(pid).children()]
        else:
            codes[pid] = os.waitstatus_to_exitcode(status)
            stopped = [other for other in stopped if other != pid]  # killed between its turns
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # ranks may have left child processes
        if not _in_groups({os.getpid(), *turns}):
            return None
    return codes


def _in_groups(groups: Set[int]) -> bool:
    """Return whether all processes of the trials are in these groups, orphans included."""
    server = psutil.Process(os.getppid())  # it adopts orphans
    for process in server.children(recursive=True):
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) not in groups:
                return False
    return True


def _resume(agent_pid: int, turn: Turn, ranks: Sequence[int], number: int) -> None:
    """Continue a trial, on the cores that the others' turns of that number begin on.

    One core may be slower than another for seconds, and a process stays where it was.
    """
    masks, begun_on = {0: os.sched_getaffinity(0)}, set[int]()
    with suppress(ProcessLookupError):  # a rank has ended
        for place, rank in enumerate(ranks):
            masks[rank] = os.sched_getaffinity(rank)
            cores = sorted(masks[rank])
            begun_on |= {core := cores[(place + number) % len(cores)]}
            os.sched_setaffinity(rank, {core})
    os.sched_setaffinity(0, masks[0] - begun_on or masks[0])  # this process is not in the way
    turn.begin(random.uniform(*TURN_SECONDS))
    os.killpg(agent_pid, signal.SIGCONT)
    for pid, mask in reversed(masks.items()):  # ranks first: what they start inherits the mask
        with suppress(ProcessLookupError):
            os.sched_setaffinity(pid, mask)
