"""Between the fork server and the ranks of one trial: PyTorch's elastic launcher, forking."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

from shardmark.core.environment_variables import (
    NODE_VARIABLE,
    ON_LOOPBACK,
    RENDEZVOUS_VARIABLE,
)
from shardmark.core.errors import STORAGE_EXIT, error_kind
from shardmark.core.processes import die_with_parent, schedule_as_batch, schedule_normally
from shardmark.core.run_files import TRIAL_FILE
from shardmark.core.text import say
from shardmark.launch.local.launcher import Launcher
from shardmark.launch.placement import MeetingPoint
from shardmark.launch.trial_artifacts import AGENT_FILE, AGENT_LOG
from shardmark.trials.trial import Trial

REPORTED = 1
"""Exit code of a rank that has left its error in its record."""


def run_agent(directory: str, task: str) -> int:
    """Start the trial's ranks, wait for them, note how each ended.  0 if all ended well.

    `STORAGE_EXIT` if a disk stopped one that could not leave a word of it.
    Runs in a process group of its own, so that the whole trial can be ended by one signal.
    """
    folder = Path(directory)
    _redirect(folder / AGENT_LOG)
    if task == "compare":
        from shardmark.equivalence.verdict import compare_cells

        compare_cells(folder)
        return 0
    schedule_as_batch()
    trial = Trial.model_validate_json((folder / TRIAL_FILE).read_text())
    here = MeetingPoint(**json.loads(os.environ.get(RENDEZVOUS_VARIABLE, "{}")))
    if trial.nodes == 1:
        os.environ |= ON_LOOPBACK
    launcher = Launcher(
        rank_main,
        (os.getpid(), trial, folder, task, here.node),
        folder=folder,
        trial=trial,
        here=here,
    )
    fine, ends = launcher.launch()
    if not fine:
        if any(end.exit_code == STORAGE_EXIT for end in ends):
            return STORAGE_EXIT
        (folder / AGENT_FILE).write_text(json.dumps([asdict(end) for end in ends]))
    return int(not fine)


def rank_main(launcher_pid: int, trial: Trial, folder: Path, task: str, node: int) -> None:
    """What the launcher calls in each forked rank of the node."""
    die_with_parent(launcher_pid)
    schedule_normally()
    # The launcher's own handler came along with the fork.  Python could not call it while the rank
    # waits in a collective, and the launcher would wait for half a minute.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The launcher numbers ranks node by node; servers sit on each node in turn.
    rank = trial.layout.ranks_by_node[node][int(os.environ["LOCAL_RANK"])]
    os.environ |= {"RANK": str(rank), NODE_VARIABLE: str(node)}
    _be_rank(trial, folder, task)


def _be_rank(trial: Trial, folder: Path, task: str) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.WARNING)
    from shardmark.equivalence.capture import capture_rank
    from shardmark.train.rank import measure, measure_trial_links, run_rank

    tasks = {"measure": measure, "capture": capture_rank, "links": measure_trial_links}
    try:
        fine = run_rank(trial, folder, tasks[task])
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception as error:
        if error_kind(error) != "storage":
            raise
        os._exit(STORAGE_EXIT)  # even its record cannot be written
    if not fine:
        os._exit(REPORTED)  # the process group may be broken: nothing is to be gained by a tidy end


def _redirect(log: Path) -> None:
    with log.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    say(f"agent started at {time.time():.3f}")
