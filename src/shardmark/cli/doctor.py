"""`shardmark doctor`: what this machine can run, what is missing and how to get it."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from shardmark.cli.arguments import TextOrJson, path_of
from shardmark.core.errors import InputError, StrategyUnavailable
from shardmark.core.text import say, say_text

if TYPE_CHECKING:
    from shardmark.core.machine import Machine
    from shardmark.measure.system.machine_checks import Check
    from shardmark.results.network import NetworkRecord

RANKS = (2, 1, 3, 4)
"""Numbers of ranks in the order in which a strategy is asked whether it makes sense with them."""
LINK_SECONDS = 8.0
STARTED_BY_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
    form: Annotated[
        TextOrJson, typer.Option("--format", help="json has every finding.")
    ] = TextOrJson.TEXT,
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
    device: Annotated[
        str | None,
        typer.Option(metavar="auto|cuda|cpu", help="With --network: whose links; auto by default."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="With --network: time for measuring, 8; starting comes on top."),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=path_of,
            help="With --network or --gpu: measure links, products and copies, and write the node's"
            " file for `plan --on`, and its card's beside it.",
        ),
    ] = None,
) -> None:
    """Say what this machine can run, what is missing and how to get it.

    Exit code 1 where something fails, or is missing and nothing can be measured without it.
    """
    as_json = form is TextOrJson.JSON
    if network and gpu:
        raise InputError("--gpu, --network", "both are given", "give one of them")
    if network:
        record = _measure_links(
            ranks,
            device or "auto",
            LINK_SECONDS if seconds is None else seconds,
            speed=write is not None,
        )
        if record is not None:  # else another rank prints
            _print_network(record, as_json=as_json)
            if write is not None:
                _write_node(write, record)
        return
    options: dict[str, object] = {"--ranks": ranks, "--device": device, "--seconds": seconds}
    options |= {} if gpu else {"--write": write}
    if given := [name for name, value in options.items() if value is not None]:
        found = "found without --network"
        raise InputError(", ".join(given), found, "add --network, or leave this out")
    healthy = _try_gpus(as_json=as_json) if gpu else _print_findings(as_json=as_json)
    if write is not None and healthy:
        _write_gpus(write)
    if not healthy:
        raise typer.Exit(1)


def _try_gpus(*, as_json: bool) -> bool:
    """Print all that a bug report needs, the answer first; whether all is well."""
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
    return not bad and here.device_type == "cuda"


def _write_gpus(path: Path) -> None:
    """From the links between all GPUs here, and what each computes."""
    from shardmark.measure.system.environment import machine

    record = _measure_links(machine().device_count, "cuda", LINK_SECONDS, speed=True)
    assert record is not None, "it was started here"
    _write_node(path, record)


def _print_findings(*, as_json: bool) -> bool:
    """Software, devices, limits and strategies; whether something can be measured."""
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
        offers = [
            (
                "ok" if offer.available else "no",
                offer.strategy,
                ("1 rank" if offer.ranks == 1 else f"{offer.ranks} ranks")
                + (f": {offer.reason}" if offer.reason else ""),
                offer.remedy,
            )
            for offer in strategies
        ]
        width = max(len(name) for _, name, *_ in (*_rows(checks), *offers))
        heading = f"strategies here, on {here.device_type}:"
        say(*_lines(_rows(checks), width), "", heading, *_lines(offers, width))
    return not problems(checks)


def strategy_availability(here: Machine) -> list[Availability]:
    """Each strategy with its default options and the first number of ranks that can run here,
    else that makes sense."""
    from shardmark.core.recipe import Recipe
    from shardmark.strategies import STRATEGIES, build_strategy

    recipe = Recipe(global_batch=64, epochs=1)  # as long as any strategy needs
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


Line = tuple[str, str, str, str | None]
"""State, name, what was found, and the remedy."""


def _rows(checks: Iterable[Check]) -> list[Line]:
    return [(check.state.value, check.name, check.found, check.remedy) for check in checks]


def _lines(rows: Iterable[Line], width: int) -> list[str]:
    """One line a finding, the remedy below it."""
    lines = []
    for state, name, found, remedy in rows:
        lines.append(f"{state:<8} {name:<{width}}  {found}")
        if remedy is not None:
            lines.append(f"{'':<8} {'':<{width}}  -> {remedy}")
    return lines


def _measure_links(
    ranks: int | None, device: str, seconds: float, *, speed: bool
) -> NetworkRecord | None:
    """Between ranks of this machine, or of `torchrun` on every node: then None on all but one.

    `speed`: also what a rank computes with its share of the cores.
    """
    from shardmark.measure.network.probe import Device, probe_network
    from shardmark.measure.system.environment import machine

    if seconds <= 0:
        raise InputError("--seconds", f"found {seconds:g}", "allowed is more than 0")
    if device not in get_args(Device):
        allowed = ", ".join(get_args(Device))
        raise InputError("--device", f"found {device!r}", f"allowed are {allowed}")
    known = cast("Device", device)

    def threads(here: int) -> int | None:
        return max(1, machine().cores // here) if speed else None

    if all(name in os.environ for name in STARTED_BY_LAUNCHER):
        from shardmark.measure.network.links import measure_links, process_group

        if ranks is not None:
            raise InputError("--ranks", "found under torchrun", "it says how many there are")
        each = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        with process_group(known) as where:
            return measure_links(where, seconds=seconds, threads=threads(each))
    count = 2 if ranks is None else ranks
    return probe_network(count, device=known, seconds=seconds, threads=threads(max(1, count)))


def _write_node(path: Path, record: NetworkRecord) -> None:
    import torch

    from shardmark.analysis.network.links import with_fits
    from shardmark.core.storage import storing
    from shardmark.measure.memory.tensors import room_bytes
    from shardmark.predict.hardware.written import write_node

    here = torch.device(record.device_type)
    name, room = "cpu", room_bytes(here, max(Counter(record.hosts).values()))
    if here.type == "cuda":
        name, room = torch.cuda.get_device_name(here), torch.cuda.mem_get_info(here)[1]
    when = time.strftime("%Y-%m-%d", time.gmtime(record.measured_at_seconds))
    with storing(path):
        beside = write_node(
            path,
            with_fits(record),
            device=name,
            memory_gib=round(room / 2**30, 2),
            source=f"shardmark doctor --network, {when}",
        )
    say(
        f"written: {path}, {beside}   predict with: shardmark plan EXPERIMENT --on {path}",
        error=True,
    )


def _print_network(record: NetworkRecord, *, as_json: bool) -> None:
    from shardmark.analysis.network.links import with_fits
    from shardmark.report.table.formats import render_json, render_tables
    from shardmark.report.views.network import links_table

    record = with_fits(record)
    if as_json:
        say_text(render_json(json.loads(record.model_dump_json())))
    else:
        say_text(render_tables([links_table(record)]))
