"""Has the ranks of a run's largest trial measure the links between them.  Imports no torch."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from shardmark.analysis.network.links import link_summary, with_fits
from shardmark.core.errors import ShardmarkError, StorageError
from shardmark.core.machine import Machine
from shardmark.core.recipe import Measure
from shardmark.launch.engine import Engine
from shardmark.launch.listener import ProgressListener
from shardmark.launch.placement import check_trial
from shardmark.launch.trial import run_unmeasured
from shardmark.measure.network.probe import DEFAULT_SECONDS, GRACE_SECONDS, RECORD_FILE
from shardmark.results.network import NETWORK_FILE, NetworkRecord, write_network
from shardmark.results.store import LINKS_REASON, RunFolder
from shardmark.trials.trial import StrategySpec, Trial

SCRATCH = ".links"
TRIAL_ID = "links"


def measure_run_links(
    folder: RunFolder,
    trials: Iterable[Trial],
    measure: Measure,
    *,
    engine: Engine,
    machine: Machine,
    listener: ProgressListener,
) -> None:
    """Store `network.json` with the run, unless it has one of as many ranks.

    What keeps it from being measured is told, noted in `environment.json` and no error.
    """
    wanted = widest(trials)
    if wanted is None:
        if measure.link_seconds:
            listener.note("measure.link_seconds: no trial has several ranks, so no links")
        return
    seconds = measure.link_seconds
    if seconds is None:
        seconds = DEFAULT_SECONDS if wanted.nodes > 1 else 0.0
    if not seconds:
        return
    stored = folder.read_or_set_aside(NetworkRecord, NETWORK_FILE, listener.note)
    if stored is not None and stored.world_size >= wanted.world_size:
        return
    trial = _asking(wanted, seconds)
    places = f" on {trial.nodes} nodes" if trial.nodes > 1 else ""
    listener.doing(
        f"measuring the links between {trial.world_size} ranks{places}, about {seconds:g} s"
    )
    try:
        record = _measured(trial, folder.path / SCRATCH, engine, machine)
    except StorageError:
        raise
    except ShardmarkError as error:
        reason = str(error)
        folder.write_environment(folder.read_environment(now=True) | {LINKS_REASON: reason})
        listener.note(f"the links could not be measured: {reason}; the trials go on")
        return
    write_network(folder.path, record)
    listener.note(f"{link_summary(record)} ({NETWORK_FILE})")


def widest(trials: Iterable[Trial]) -> Trial | None:
    """The trial on most nodes, of these one with most ranks; None without one of several ranks."""
    several = [trial for trial in trials if trial.world_size > 1 and trial.layout.processes > 1]
    return max(several, key=lambda trial: (trial.nodes, trial.world_size), default=None)


def _asking(trial: Trial, seconds: float) -> Trial:
    """The trial's training ranks on its nodes, each of them in one group."""
    changes = {
        "id": TRIAL_ID,
        "strategy": StrategySpec(name="ddp"),
        "measure": trial.measure.model_copy(update={"link_seconds": seconds}),
        "limits": trial.limits.model_copy(update={"trial_seconds": seconds + GRACE_SECONDS}),
        "slow_ranks": {},
    }
    # A copy would keep the layout of the other strategy.
    return Trial.model_validate(trial.model_dump() | changes)


def _measured(trial: Trial, scratch: Path, engine: Engine, machine: Machine) -> NetworkRecord:
    """The fitted record; `ShardmarkError` with the reason why there is none."""
    check_trial(trial, machine, engine)
    engine.prepare(trial)
    check_trial(trial, machine, engine)  # what could not be prepared, the engine lacks
    shutil.rmtree(scratch, ignore_errors=True)  # an earlier command may have been killed
    try:
        outcome, failure, _ = run_unmeasured(trial, scratch, engine, "links")
        try:
            content = (scratch / RECORD_FILE).read_bytes()
            return with_fits(NetworkRecord.model_validate_json(content))
        except (OSError, ValidationError):
            why = "the ranks left no record" if failure is None else failure.reason
            raise ShardmarkError(f"{outcome}: {why}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
