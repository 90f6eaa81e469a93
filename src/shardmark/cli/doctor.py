"""`shardmark doctor`: says what this machine can run, what is missing and how to get it."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardmark.base.errors import InputError, ShardmarkError, StrategyUnavailable
from shardmark.base.text import counted, say, say_text
from shardmark.cli.arguments import FormatOption, TextOrJson, path_of

if TYPE_CHECKING:
    from shardmark.base.machine import Machine
    from shardmark.base.results.network import NetworkRecord
    from shardmark.ranks.measure.network.probe import Device
    from shardmark.ranks.measure.system.machine_checks import Check

RANKS = (2, 1, 3, 4)
"""Numbers of ranks, in the order in which a strategy is asked whether it supports them."""
LINK_SECONDS = 8.0
ALL_REDUCE_SECONDS = 3.0
STARTED_BY_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """A strategy with a number of ranks, and the reason if it cannot run here."""

    strategy: str
    ranks: int
    available: bool
    reason: str | None = None
    remedy: str | None = None


def doctor(
    *,
    form: FormatOption = TextOrJson.TEXT,
    network: Annotated[
        bool,
        typer.Option(
            "--network",
            help="Measure only latency and bandwidth between ranks: started here, or by"
            " `torchrun --no-python shardmark doctor --network` on every node.",
        ),
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(help="With --network: number of processes; 2 by default.")
    ] = None,
    device: Annotated[
        Literal["auto", "cuda", "cpu"] | None,
        typer.Option(help="With --network: device of the messages; auto by default."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="With --network: time for measuring, without start-up; 8 by default."),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=path_of,
            help="With --network: also measure matrix products and copies, and write a file of the"
            " node for `plan --on`, and a file of its card beside it.",
        ),
    ] = None,
) -> None:
    """Say what this machine can run, what is missing and how to get it.

    Where there are GPUs, it multiplies matrices on each and copies between them, and with several
    it all-reduces by NCCL.  Exit code 1 where something fails, or is missing and nothing can be
    measured without it.
    """
    as_json = form is TextOrJson.JSON
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
    options = {"--ranks": ranks, "--device": device, "--seconds": seconds, "--write": write}
    if names := [name for name, value in options.items() if value is not None]:
        problem = "found without --network"
        raise InputError(", ".join(names), problem, "add --network, or leave this out")
    if not _print_findings(as_json=as_json):
        raise typer.Exit(1)


def _print_findings(*, as_json: bool) -> bool:
    """Print software, devices, limits and strategies; return whether trials can be measured."""
    from shardmark.ranks.measure.system.environment import machine
    from shardmark.ranks.measure.system.gpu_probe import gpu_checks
    from shardmark.ranks.measure.system.gpus import all_cuda_devices
    from shardmark.ranks.measure.system.machine_checks import (
        device_checks,
        host_checks,
        problems,
        software_checks,
    )

    this_machine = machine()
    checks = [
        *software_checks(),
        *device_checks(this_machine, all_cuda_devices()),
        *host_checks(this_machine),
    ]
    if this_machine.device_type == "cuda" and not problems(checks):
        checks += gpu_checks()
        if this_machine.device_count > 1 and not problems(checks):
            checks.append(_all_reduce_check(this_machine.device_count))
    strategies = strategy_availability(this_machine)
    if as_json:
        findings = {"machine": this_machine, "checks": checks, "strategies": strategies}
        say(*json.dumps(findings, default=asdict, indent=2).split("\n"))
    else:
        offers = [
            (
                "ok" if offer.available else "no",
                offer.strategy,
                counted(offer.ranks, "rank") + (f": {offer.reason}" if offer.reason else ""),
                offer.remedy,
            )
            for offer in strategies
        ]
        width = max(len(name) for _, name, *_ in (*_rows(checks), *offers))
        heading = f"strategies here, on {this_machine.device_type}:"
        say(*_lines(_rows(checks), width), "", heading, *_lines(offers, width))
    return not problems(checks)


def _all_reduce_check(gpus: int) -> Check:
    """Check an all-reduce over all GPUs, and measure the links between them."""
    from shardmark.bench.analysis.network.links import link_summary, with_fits
    from shardmark.ranks.measure.network.probe import probe_network
    from shardmark.ranks.measure.system.machine_checks import Check, State

    name = f"NCCL, {gpus} GPUs"
    try:
        record = with_fits(probe_network(gpus, device="cuda", seconds=ALL_REDUCE_SECONDS))
    except ShardmarkError as error:
        remedy = "run it again with NCCL_DEBUG=INFO, and look at the copies above"
        return Check(name=name, state=State.FAILED, found=str(error), remedy=remedy)
    return Check(name=name, state=State.OK, found=f"the sum is correct; {link_summary(record)}")


def strategy_availability(this_machine: Machine) -> list[Availability]:
    """Return every strategy with its default options and the first number of ranks that can run.

    A strategy that cannot run here has the first number of ranks that it supports.
    """
    from shardmark.base.recipe import Recipe
    from shardmark.ranks.strategies import STRATEGIES, build_strategy

    recipe = Recipe(global_batch=64, epochs=1)  # long enough for every strategy
    answers = []
    for name in STRATEGIES:
        strategy = build_strategy(name, {})
        tried = []
        for ranks in RANKS:
            if strategy.unsupported_reason(ranks) is None:
                offer = Availability(strategy=name, ranks=ranks, available=True)
                try:
                    strategy.check(ranks, this_machine, recipe)
                except StrategyUnavailable as error:
                    offer = replace(
                        offer, available=False, reason=error.reason, remedy=error.remedy
                    )
                tried.append(offer)
        answers.append(next((offer for offer in tried if offer.available), tried[0]))
    return answers


Line = tuple[str, str, str, str | None]
"""State, name, finding and remedy."""


def _rows(checks: Iterable[Check]) -> list[Line]:
    return [(check.state.value, check.name, check.found, check.remedy) for check in checks]


def _lines(rows: Iterable[Line], width: int) -> list[str]:
    """Format one line for each finding, and below it one for its remedy."""
    lines = []
    for state, name, finding, remedy in rows:
        lines.append(f"{state:<8} {name:<{width}}  {finding}")
        if remedy is not None:
            lines.append(f"{'':<8} {'':<{width}}  -> {remedy}")
    return lines


def _measure_links(
    ranks: int | None, device: Device, seconds: float, *, speed: bool
) -> NetworkRecord | None:
    """Measure links between ranks of this machine, or between those that `torchrun` started.

    Under `torchrun` all ranks but one return None.  `speed` also measures matrix products and
    copies of a rank with its share of the cores.
    """
    from shardmark.ranks.measure.network.probe import probe_network
    from shardmark.ranks.measure.system.environment import machine

    if seconds <= 0:
        raise InputError("--seconds", f"found {seconds:g}", "allowed is more than 0")

    def threads(local_ranks: int) -> int | None:
        return max(1, machine().cores // local_ranks) if speed else None

    if all(name in os.environ for name in STARTED_BY_LAUNCHER):
        from shardmark.ranks.measure.network.links import measure_links, process_group

        if ranks is not None:
            raise InputError("--ranks", "found under torchrun", "torchrun sets the number of ranks")
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        with process_group(device) as group:
            return measure_links(group, seconds=seconds, threads=threads(local_ranks))
    count = 2 if ranks is None else ranks
    return probe_network(count, device=device, seconds=seconds, threads=threads(max(1, count)))


def _write_node(path: Path, record: NetworkRecord) -> None:
    import torch

    from shardmark.base.files.storage import storing
    from shardmark.bench.analysis.network.links import with_fits
    from shardmark.predict.hardware.written import write_node
    from shardmark.ranks.measure.memory.tensors import room_bytes

    device = torch.device(record.device_type)
    name, memory_bytes = "cpu", room_bytes(device, max(Counter(record.hosts).values()))
    if device.type == "cuda":
        name, memory_bytes = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1]
    date = time.strftime("%Y-%m-%d", time.gmtime(record.measured_at_seconds))
    with storing(path):
        card = write_node(
            path,
            with_fits(record),
            device=name,
            memory_gib=round(memory_bytes / 2**30, 2),
            source=f"shardmark doctor --network, {date}",
        )
    say(
        f"written: {path}, {card}   predict with: shardmark plan EXPERIMENT --on {path}", error=True
    )


def _print_network(record: NetworkRecord, *, as_json: bool) -> None:
    from shardmark.base.table.formats import render_tables
    from shardmark.base.text import render_json
    from shardmark.bench.analysis.network.links import with_fits
    from shardmark.bench.report.views.network import links_table

    record = with_fits(record)
    if as_json:
        say_text(render_json(json.loads(record.model_dump_json())))
    else:
        say_text(render_tables([links_table(record)]))
