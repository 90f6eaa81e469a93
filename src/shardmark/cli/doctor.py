"""`shardmark doctor`: what this machine can run, what is missing and how to get it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from shardmark.cli.arguments import path_of
from shardmark.core.errors import InputError, StrategyUnavailable
from shardmark.core.storage import storing
from shardmark.core.text import say, say_text

if TYPE_CHECKING:
    from shardmark.core.machine import Machine
    from shardmark.measure.network.probe import Device
    from shardmark.measure.system.machine_checks import Check
    from shardmark.results.network import NetworkRecord

RANKS = (2, 1, 3, 4)
"""Numbers of ranks in the order in which a strategy is asked whether it makes sense with them."""
STARTED_BY_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Format(StrEnum):
    """How the findings are printed."""

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """Whether a strategy can run here with so many ranks."""

    strategy: str
    ranks: int
    available: bool
    reason: str | None = None
    remedy: str | None = None


def doctor(
    *,
    form: Annotated[Format, typer.Option("--format", help="json has every finding.")] = Format.TEXT,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu",
            help="Also try the GPUs: a kernel, copies, NCCL, and a few steps of every strategy."
            "  Two minutes; names no host and no folder.",
        ),
    ] = False,
    network: Annotated[
        bool,
        typer.Option(
            "--network",
            help="Instead, measure latency and bandwidth between ranks: started here, or by"
            " `torchrun --no-python shardmark doctor --network` on every node.",
        ),
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(help="With --network: processes to start; 2 by default.")
    ] = None,
    largest_of: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="EXPERIMENT", help="With --network: as many as its largest trial has."
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="auto|cuda|cpu", help="With --network: whose links.")
    ] = "auto",
    seconds: Annotated[
        float, typer.Option(help="With --network: time for measuring; starting comes on top.")
    ] = 8.0,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", parser=path_of, help="With --network: store network.json with this run."
        ),
    ] = None,
) -> None:
    """Say what this machine can run, what is missing and how to get it.

    Exit code 1 where something fails, or is missing and nothing can be measured without it.
    """
    as_json = form is Format.JSON
    if network and gpu:
        raise InputError("--gpu, --network", "both are given", "give one of them")
    if network:
        _check_network(device, seconds, run)
        record = _measure_links(ranks, largest_of, cast("Device", device), seconds)
        if record is not None:  # else another rank prints
            _print_network(record, run, as_json=as_json)
        return
    given = [
        name
        for name, value, default in (
            ("--ranks", ranks, None),
            ("--for", largest_of, None),
            ("--run", run, None),
            ("--device", device, "auto"),
            ("--seconds", seconds, 8.0),
        )
        if value != default
    ]
    if given:
        found = "found without --network"
        raise InputError(", ".join(given), found, "add --network, or leave this out")
    if gpu:
        _try_gpus(as_json=as_json)
    else:
        _print_findings(as_json=as_json)


def _try_gpus(*, as_json: bool) -> None:
    """All that a bug report needs; the answer first."""
    from shardmark.core.version import __version__
    from shardmark.launch.gpu_check import gpu_sections
    from shardmark.measure.system.environment import machine
    from shardmark.measure.system.machine_checks import problems
    from shardmark.progress.lines import Lines

    began, here = time.monotonic(), machine()
    can_run = {
        offer.strategy: offer.ranks for offer in strategy_availability(here) if offer.available
    }
    sections = gpu_sections(here, can_run, Lines(error=True))
    bad = problems(check for section in sections for check in section.checks)
    if here.device_type != "cuda":
        answer = "nothing to check: no GPU can be used here"
    elif bad:
        answer = f"failed: {', '.join(dict.fromkeys(bad))}"
    else:
        answer = "all that was tried works"
    if as_json:
        findings = {"answer": answer, "sections": sections}
        say(*json.dumps(findings, default=asdict, indent=2).split("\n"))
    else:
        width = max(len(check.name) for section in sections for check in section.checks)
        say(f"{answer} (shardmark {__version__}, {time.monotonic() - began:.0f} s)")
        for section in sections:
            say("", f"{section.title}:", *_lines(_rows(section.checks), width))
    if bad or here.device_type != "cuda":
        raise typer.Exit(1)


def _print_findings(*, as_json: bool) -> None:
    from shardmark.measure.system.environment import machine
    from shardmark.measure.system.gpus import all_cuda_devices
    from shardmark.measure.system.machine_checks import (
        device_checks,
        host_checks,
        problems,
        software_checks,
    )

    here = machine()
    checks = [*software_checks(), *device_checks(here, all_cuda_devices()), *host_checks(here)]
    strategies = strategy_availability(here)
    if as_json:
        findings = {"machine": here, "checks": checks, "strategies": strategies}
        say(*json.dumps(findings, default=asdict, indent=2).split("\n"))
    else:
        say(*_text(here, checks, strategies))
    if problems(checks):
        raise typer.Exit(1)


def strategy_availability(here: Machine) -> list[Availability]:
    """Each strategy with its default options and the first number of ranks that can run here,
    else that makes sense."""
    from shardmark.core.recipe import Recipe
    from shardmark.strategies import STRATEGIES, build_strategy

    recipe = Recipe(global_batch=64, steps=1)
    answers = []
    for name in STRATEGIES:
        strategy = build_strategy(name, {})
        tried = []
        for ranks in RANKS:
            if strategy.unsupported_reason(ranks) is None:
                offer = Availability(strategy=name, ranks=ranks, available=True)
                try:
                    strategy.check(ranks, here, recipe)
                except StrategyUnavailable as error:
                    offer = replace(
                        offer, available=False, reason=error.reason, remedy=error.remedy
                    )
                tried.append(offer)
        answers.append(next((offer for offer in tried if offer.available), tried[0]))
    return answers


def _text(here: Machine, checks: Iterable[Check], strategies: Iterable[Availability]) -> list[str]:
    """For people: one line a finding, the remedy below it."""
    findings, offers = _rows(checks), []
    for offer in strategies:
        found = "1 rank" if offer.ranks == 1 else f"{offer.ranks} ranks"
        found += f": {offer.reason}" if offer.reason else ""
        offers.append(("ok" if offer.available else "no", offer.strategy, found, offer.remedy))
    width = max(len(name) for _, name, _, _ in (*findings, *offers))
    heading = f"strategies here, on {here.device_type}:"
    return [*_lines(findings, width), "", heading, *_lines(offers, width)]


def _rows(checks: Iterable[Check]) -> list[tuple[str, str, str, str | None]]:
    return [(check.state.value, check.name, check.found, check.remedy) for check in checks]


def _lines(rows: Iterable[tuple[str, str, str, str | None]], width: int) -> list[str]:
    lines = []
    for state, name, found, remedy in rows:
        lines.append(f"{state:<8} {name:<{width}}  {found}")
        if remedy is not None:
            lines.append(f"{'':<8} {'':<{width}}  -> {remedy}")
    return lines


def _check_network(device: str, seconds: float, run: Path | None) -> None:
    from shardmark.measure.network.probe import Device
    from shardmark.results.files import read_model
    from shardmark.results.network import NETWORK_FILE, NetworkRecord
    from shardmark.results.store import RunFolder, is_run

    if run is not None:
        if not is_run(run):
            raise InputError(f"--run {run}", "is no run's folder", "name one that `run` wrote")
        RunFolder.check(run)
        with suppress(FileNotFoundError, ValueError):  # what is damaged may be measured again
            read_model(NetworkRecord, run / NETWORK_FILE)
    if seconds <= 0:
        raise InputError("--seconds", f"found {seconds:g}", "allowed is more than 0")
    if device not in get_args(Device):
        allowed = ", ".join(get_args(Device))
        raise InputError("--device", f"found {device!r}", f"allowed are {allowed}")


def _measure_links(
    ranks: int | None, experiment: str | None, device: Device, seconds: float
) -> NetworkRecord | None:
    """Between ranks of this machine, or of `torchrun` on every node: then None on all but one."""
    if all(name in os.environ for name in STARTED_BY_LAUNCHER):
        from shardmark.measure.network.links import measure_links, process_group

        if ranks is not None or experiment is not None:
            raise InputError("--ranks, --for", "found under torchrun", "it says how many there are")
        with process_group(device) as where:
            return measure_links(where, seconds=seconds)
    from shardmark.measure.network.probe import probe_network

    if experiment is not None:
        if ranks is not None:
            raise InputError("--ranks, --for", "both are given", "give one of them")
        ranks = _most_processes(experiment)
    return probe_network(2 if ranks is None else ranks, device=device, seconds=seconds)


def _most_processes(experiment: str) -> int:
    """Of any trial of the experiment."""
    from shardmark.config.load import load_experiment
    from shardmark.trials.matrix import expand

    trials = expand(load_experiment(experiment)).trials
    most = max((trial.layout.processes for trial in trials), default=1)
    if most < 2:
        raise InputError(f"--for {experiment}", "has no trial of several ranks", "give --ranks")
    return most


def _print_network(record: NetworkRecord, run: Path | None, *, as_json: bool) -> None:
    """Fit, print, and store with the run where one is named."""
    from shardmark.analysis.network.links import with_fits
    from shardmark.report.table.formats import render_json, render_tables
    from shardmark.report.views.network import links_table

    record = with_fits(record)
    if as_json:
        say_text(render_json(json.loads(record.model_dump_json())))
    else:
        say_text(render_tables([links_table(record)]))
    if run is not None:
        _store(run, record)


def _store(run: Path, record: NetworkRecord) -> None:
    from shardmark.results.network import NETWORK_FILE, NetworkRecord, write_network
    from shardmark.results.store import RunFolder

    folder, tell = RunFolder(run), partial(say, error=True)
    with storing(run), folder.locked(tell):
        RunFolder.check(run)
        folder.take_up(NetworkRecord, NETWORK_FILE, tell)
        write_network(run, record)
