"""`shardmark doctor --network`: what the links between ranks can do."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

import typer

from shardmark.core.errors import InputError

if TYPE_CHECKING:
    from shardmark.results.network import NetworkRecord

STARTED_BY_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DEFAULT_RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """What the command line asked for."""

    ranks: int | None
    experiment: str | None
    device: str
    seconds: float
    run: Path | None
    as_json: bool


def measure_network(options: NetworkOptions) -> None:
    """Measure, fit, store with the run where one is named, and print.

    Started by `torchrun` on every node, the ranks are those; else they are started here.
    """
    from shardmark.analysis.network.links import with_fits
    from shardmark.results.network import write_network
    from shardmark.results.store import is_run

    if options.run is not None and not is_run(options.run):
        raise InputError(f"--run {options.run}", "is no run's folder", "name one that `run` wrote")
    if options.seconds <= 0:
        raise InputError("--seconds", f"found {options.seconds:g}", "allowed is more than 0")
    record = _measured(options)
    if record is None:
        return  # another rank prints
    record = with_fits(record)
    if options.run is not None:
        write_network(options.run, record)
    if options.as_json:
        typer.echo(record.model_dump_json(indent=2))
        return
    from shardmark.report.table.formats import render_tables
    from shardmark.report.views.network import links_table

    typer.echo(render_tables([links_table(record)]), nl=False)


def _measured(options: NetworkOptions) -> NetworkRecord | None:
    """None on a rank of several machines that is not the first."""
    from shardmark.measure.network.probe import Device, probe_network

    if options.device not in get_args(Device):
        allowed = ", ".join(get_args(Device))
        raise InputError("--device", f"found {options.device!r}", f"allowed are {allowed}")
    if all(name in os.environ for name in STARTED_BY_LAUNCHER):
        if options.ranks is not None or options.experiment is not None:
            raise InputError("--ranks, --for", "found under torchrun", "it says how many there are")
        from shardmark.measure.network.links import measure_links, process_group

        with process_group(options.device) as where:
            return measure_links(where, seconds=options.seconds)
    device = cast("Device", options.device)
    return probe_network(_ranks(options), device=device, seconds=options.seconds)


def _ranks(options: NetworkOptions) -> int:
    """The most processes that a trial of the experiment has."""
    if options.experiment is None:
        return DEFAULT_RANKS if options.ranks is None else options.ranks
    if options.ranks is not None:
        raise InputError("--ranks, --for", "both are given", "give one of them")
    from shardmark.config.load import load_experiment
    from shardmark.trials.matrix import expand

    experiment = load_experiment(options.experiment)
    most = max((trial.layout.processes for trial in expand(experiment).trials), default=1)
    if most < 2:
        raise InputError(
            f"--for {options.experiment}", "has no trial of several ranks", "give --ranks"
        )
    return most
