"""The engine `slurm`: one allocation for a run, and a step of it for each trial."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from shardmark.config.engines import SlurmOptions
from shardmark.core.errors import InputError, ShardmarkError
from shardmark.core.machine import Machine
from shardmark.launch.engine import Engine, Errand, Task, Tell
from shardmark.launch.nodes.cluster import ClusterEngine
from shardmark.launch.nodes.host_commands import listening_address, resolved
from shardmark.launch.nodes.roster import Roster
from shardmark.launch.outcome import Ending
from shardmark.launch.slurm.job import command_words, do_in_job
from shardmark.launch.slurm.options import flags, sbatch_options
from shardmark.launch.slurm.state import job_state
from shardmark.launch.slurm.step import Step, own_name, step_words
from shardmark.trials.trial import Trial

COMMON_STEP = "shardmark"
"""Name of the step that tells what the nodes are, and verifies."""
NOTICE_SECONDS = 2.0
"""For a job that is being ended to be known as such, once its ranks have been."""


class Size(NamedTuple):
    """What the engine has to know of an experiment."""

    nodes: int
    """The most that any trial takes."""
    name: str


class SlurmEngine:
    """Has each trial run by a step of its own; `make` makes the engine of one."""

    samples = True

    def __init__(
        self,
        make: Callable[[int, str], Engine],
        *,
        nodes: int,
        step_per_trial: bool,
        is_ending: Callable[[], bool],
    ) -> None:
        self._make = make
        self._nodes = nodes
        self._step_per_trial = step_per_trial
        self._is_ending = is_ending
        self._step: Engine | None = None
        self._load: tuple[Sequence[str], str] | None = None
        self._loaded = False
        """Whether the present step has it."""
        self._unreachable: tuple[int, str] | None = None
        """So many nodes could not be brought together, and why."""

    def machine(self, device: str) -> Machine:
        return self._any_step().machine(device)

    def environments(self) -> list[dict[str, Any]]:
        return self._any_step().environments()

    def load(self, modules: Sequence[str], device_type: str) -> None:
        """Each step loads once it is needed: the first one may only tell what the nodes are."""
        self._load = (modules, device_type)
        self._loaded = False

    def lacks(self, nodes: int) -> str | None:
        if nodes > self._nodes:
            return f"{nodes} nodes are asked for, and the allocation has {self._nodes}"
        if self._unreachable is not None and nodes >= self._unreachable[0]:
            return self._unreachable[1]
        return None if self._step_per_trial else self._any_step().lacks(nodes)

    def prepare(self, trial: Trial) -> None:
        """End the step before, and have the trial's own there with the libraries loaded."""
        try:
            if self._step_per_trial:
                self.close()
                self._step = self._make(trial.nodes, trial.id)
            self._loaded_step().prepare(trial)
        except InputError:
            raise  # the nodes are there, and what they are to load is not
        except ShardmarkError as error:
            self._unreachable = (trial.nodes, str(error))
            self.close()

    def run(
        self,
        directory: Path,
        *,
        trial_seconds: float,
        on_tick: Callable[[], None],
        task: Task = "measure",
    ) -> Ending:
        step = self._loaded_step()
        ending = step.run(directory, trial_seconds=trial_seconds, on_tick=on_tick, task=task)
        well = ending.agent_exit_code == 0 and not ending.failures and ending.lost is None
        if ending.how != "exited" or well:
            return ending
        # The scheduler ends a job by ending all its processes at once: the ranks did not fail.
        deadline = time.monotonic() + NOTICE_SECONDS
        while time.monotonic() < deadline:
            if self._is_ending():
                return replace(ending, how="interrupted", lost=None)
            time.sleep(NOTICE_SECONDS / 4)
        return ending

    def close(self) -> None:
        if self._step is not None:
            self._step.close()
            self._step = None
        self._loaded = False

    def _any_step(self) -> Engine:
        if self._step is None:
            self._step = self._make(self._nodes, COMMON_STEP)
        return self._step

    def _loaded_step(self) -> Engine:
        step = self._any_step()
        if self._load is not None and not self._loaded:
            step.load(*self._load)
            self._loaded = True
        return step


def build(options: SlurmOptions, size: Size, key: Mapping[str, str], tell: Tell) -> SlurmEngine:
    """The controlling side, on the first node of an allocation; nothing is started yet."""
    job = _allocation(size.nodes)

    def make_roster(count: int) -> Roster:
        place = (listening_address(_resolved(options)), 0)
        try:
            return Roster(place, wanted=count, key=key, patience=options.node_seconds)
        except OSError as error:
            raise InputError(
                "engine.host",
                f"this node cannot listen at {place[0]}: {error.strerror or error}",
                "a name or an address of the allocation's first node",
            ) from None

    def make(count: int, title: str) -> ClusterEngine:
        return ClusterEngine(
            lambda: make_roster(count),
            Step(options, count, key, job=job, title=title),
            join_seconds=options.join_seconds,
            tell=tell if title == COMMON_STEP else lambda _: None,
        )

    return SlurmEngine(
        make,
        nodes=size.nodes,
        step_per_trial=options.step == "trial",
        is_ending=lambda: (state := job_state(job)) is not None and state.state != "RUNNING",
    )


def do_elsewhere(options: SlurmOptions, size: Size, errand: Errand, tell: Tell) -> int | None:
    """The command's exit code, where it is done in a job or by a process on the first node."""
    if "SLURM_JOB_ID" not in os.environ:
        return do_in_job(
            sbatch_options(options, size.nodes, size.name), options.setup, errand, tell
        )
    if "SLURMD_NODENAME" not in os.environ:
        return _on_first_node(errand)
    if os.environ.get("SLURM_PROCID", "0") != "0":
        tell("the first task of this step controls the run; this one has nothing to do")
        return 0
    return None


def submission(options: SlurmOptions, size: Size, command: Sequence[str]) -> list[str]:
    """The script that would be submitted, and the step of each trial."""
    asked = sbatch_options(options, size.nodes, size.name)
    step = step_words(options, size.nodes, {}, title="TRIAL", host="FIRST-NODE", port="PORT")
    return [
        *(f"#SBATCH {flag}" for flag in flags(asked)),
        *options.setup,
        shlex.join(command),
        f"{'each trial' if options.step == 'trial' else 'all trials'}: {shlex.join(step)}",
    ]


def _allocation(nodes: int) -> str:
    """The id of the job that this process controls a run in; raises `InputError` if it cannot."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        raise InputError(
            "engine.name",
            "slurm, outside an allocation",
            "the commands run and verify submit a job; from Python, start inside one (sbatch)",
        )
    allocated = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    if nodes > allocated:
        raise InputError(
            "SLURM_JOB_NUM_NODES",
            f"the allocation has {allocated}, and the experiment takes {nodes} nodes",
            f"allocate them: sbatch --nodes={nodes}; outside an allocation they are asked for",
        )
    if os.environ.get("SLURM_NODEID", "0") != "0":
        raise InputError(
            "SLURM_NODEID", "this is not the allocation's first node", "give the command there"
        )
    return job


def _on_first_node(errand: Errand) -> int:
    """From the shell of `salloc`, which may be on another machine than the allocation's nodes."""
    words = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--relative=0", "--cpu-bind=none"]
    words += ["--export=ALL", sys.executable, "-m", "shardmark", *command_words(errand)]
    started = subprocess.Popen(words, start_new_session=True)  # srun has its own idea of Ctrl-C
    try:
        return started.wait()
    except KeyboardInterrupt:
        started.terminate()  # handed on to the task, which stores the trial under way
        started.wait()
        raise


def _resolved(options: SlurmOptions) -> str:
    name = own_name(options)
    try:
        return resolved(name)
    except InputError as error:
        raise InputError("engine.host", *error.args[1:]) from None
