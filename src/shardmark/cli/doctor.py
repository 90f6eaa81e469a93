"""`shardmark doctor`: what this machine can run, what is missing and how to get it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shardmark.core.machine import Machine
    from shardmark.measure.system.machine_checks import Check

RANKS = (2, 1, 3, 4)
"""Numbers of ranks in the order in which a strategy is asked whether it makes sense with them."""


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
        typer.Option(metavar="RUN", help="With --network: store network.json with this run."),
    ] = None,
) -> None:
    """Say what this machine can run, what is missing and how to get it.

    Exit code 1 where something is missing without which nothing can be measured.
    """
    if network:
        from shardmark.cli.doctor_network import NetworkOptions, measure_network

        measure_network(
            NetworkOptions(
                ranks=ranks,
                experiment=largest_of,
                device=device,
                seconds=seconds,
                run=run,
                as_json=form is Format.JSON,
            )
        )
        return
    _refuse_of_network(
        {"--ranks": ranks, "--for": largest_of, "--run": run},
        {"--device": (device, "auto"), "--seconds": (seconds, 8.0)},
    )
    from shardmark.measure.system.environment import machine
    from shardmark.measure.system.gpus import all_cuda_devices
    from shardmark.measure.system.machine_checks import (
        ESSENTIAL,
        State,
        device_checks,
        host_checks,
        software_checks,
    )

    here = machine()
    checks = [*software_checks(), *device_checks(here, all_cuda_devices()), *host_checks(here)]
    strategies = strategy_availability(here)
    if form is Format.JSON:
        findings = {"machine": here, "checks": checks, "strategies": strategies}
        typer.echo(json.dumps(findings, default=asdict, indent=2))
    else:
        typer.echo(render(here, checks, strategies))
    broken = [check for check in checks if check.name in ESSENTIAL and check.state is State.MISSING]
    if broken:
        raise typer.Exit(1)


def _refuse_of_network(
    optional: Mapping[str, object], with_default: Mapping[str, tuple[object, object]]
) -> None:
    """Raise `InputError` for options that say nothing without --network."""
    from shardmark.core.errors import InputError

    given = [name for name, value in optional.items() if value is not None]
    given += [name for name, (value, default) in with_default.items() if value != default]
    if given:
        found = "found without --network"
        raise InputError(", ".join(given), found, "add --network, or leave this out")


def strategy_availability(here: Machine) -> list[Availability]:
    """Each strategy with its default options and the first number of ranks that makes sense."""
    from shardmark.core.errors import StrategyUnavailable
    from shardmark.core.recipe import Recipe
    from shardmark.strategies import STRATEGIES, build_strategy

    recipe = Recipe(global_batch=64, steps=1)
    answers = []
    for name in STRATEGIES:
        strategy = build_strategy(name, {})
        ranks = next((one for one in RANKS if strategy.unsupported_reason(one) is None), RANKS[0])
        reason = remedy = None
        try:
            strategy.check(ranks, here, recipe)
        except StrategyUnavailable as error:
            reason, remedy = error.reason, error.remedy
        answers.append(
            Availability(
                strategy=name,
                ranks=ranks,
                available=reason is None,
                reason=reason,
                remedy=remedy,
            )
        )
    return answers


def render(here: Machine, checks: Iterable[Check], strategies: Iterable[Availability]) -> str:
    """For people: one line a finding, the remedy below it."""
    rows = [(check.state.value, check.name, check.found, check.remedy) for check in checks]
    offers = [
        (
            "ok" if one.available else "no",
            one.strategy,
            f"{one.ranks} rank{'s' if one.ranks > 1 else ''}"
            + (f": {one.reason}" if one.reason else ""),
            one.remedy,
        )
        for one in strategies
    ]
    width = max(len(name) for _, name, _, _ in (*rows, *offers))
    return "\n".join(
        [
            *_lines(rows, width),
            "",
            f"strategies here, on {here.device_type}:",
            *_lines(offers, width),
        ]
    )


def _lines(rows: Iterable[tuple[str, str, str, str | None]], width: int) -> list[str]:
    lines = []
    for state, name, found, remedy in rows:
        lines.append(f"{state:<8} {name:<{width}}  {found}")
        if remedy is not None:
            lines.append(f"{'':<8} {'':<{width}}  -> {remedy}")
    return lines
