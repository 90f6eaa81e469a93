"""Measures the links between the ranks of a run's largest trial.  Imports no torch."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from shardmark.base.errors import ShardmarkError, StorageError
from shardmark.base.machine import Machine
from shardmark.base.recipe import Measure
from shardmark.base.results.network import NETWORK_FILE, NetworkRecord, write_network
from shardmark.base.results.store import LINKS_REASON
from shardmark.bench.analysis.network.links import link_summary, with_fits
from shardmark.bench.launch.engine import Engine
from shardmark.bench.launch.placement import check_trial
from shardmark.bench.launch.trial import TrialRunner, run_unmeasured
from shardmark.ranks.measure.network.probe import DEFAULT_SECONDS, GRACE_SECONDS, RECORD_FILE
from shardmark.ranks.trial import StrategySpec, Trial

SCRATCH = ".links"
TRIAL_ID = "links"


def measure_run_links(runner: TrialRunner, trials: Iterable[Trial], measure: Measure) -> None:
    """Store `network.json` with the run, unless it has one of as many ranks.

    A failure is reported and noted in `environment.json`; the trials go on.
    """
    folder, listener = runner.folder, runner.listener
    largest = widest(trials)
    if largest is None:
        if measure.link_seconds:
            listener.note("measure.link_seconds: no trial has several ranks, so no links")
        return
    seconds = measure.link_seconds
    if seconds is None:
        seconds = DEFAULT_SECONDS if largest.nodes > 1 else 0.0
    if not seconds:
        return
    stored = folder.read_or_set_aside(NetworkRecord, NETWORK_FILE, listener.note)
    if stored is not None and stored.world_size >= largest.world_size:
        return
    trial = _links_trial(largest, seconds)
    places = f" on {trial.nodes} nodes" if trial.nodes > 1 else ""
    listener.doing(
        f"measuring the links between {trial.world_size} ranks{places}, about {seconds:g} s"
    )
    try:
        record = _measure(trial, folder.path / SCRATCH, runner.engine, runner.machine)
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
    """Return the trial with most nodes and then most ranks; None if no trial has several ranks."""
    several = [trial for trial in trials if trial.world_size > 1 and trial.layout.processes > 1]
    return max(several, key=lambda trial: (trial.nodes, trial.world_size), default=None)


def _links_trial(trial: Trial, seconds: float) -> Trial:
    """Return a trial that measures links between the training ranks of the given one."""
    changes = {
        "id": TRIAL_ID,
        "strategy": StrategySpec(name="ddp"),
        "measure": trial.measure.model_copy(update={"link_seconds": seconds}),
        "limits": trial.limits.model_copy(update={"trial_seconds": seconds + GRACE_SECONDS}),
        "slow_ranks": {},
    }
    # `model_copy` would keep the layout of the other strategy.
    return Trial.model_validate(trial.model_dump() | changes)


def _measure(trial: Trial, scratch: Path, engine: Engine, machine: Machine) -> NetworkRecord:
    """Return the fitted record; raise `ShardmarkError` with the reason if there is none."""
    check_trial(trial, machine, engine)
    engine.prepare(trial)
    check_trial(trial, machine, engine)  # `prepare` reports its failures there
    shutil.rmtree(scratch, ignore_errors=True)  # an earlier command may have been killed
    try:
        outcome, failure, _ = run_unmeasured(trial, scratch, engine, "links")
        try:
            content = (scratch / RECORD_FILE).read_bytes()
            return with_fits(NetworkRecord.model_validate_json(content))
        except (OSError, ValidationError):
            reason = "the ranks wrote no record" if failure is None else failure.reason
            raise ShardmarkError(f"{outcome}: {reason}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
