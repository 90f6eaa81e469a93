"""Whether the strategies of a run train the same thing, as the report page tells it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardmark.analysis.compare.rows import plain
from shardmark.config.axes import title_of
from shardmark.report.table.table import NOTHING, Column, Table, Value, table_of
from shardmark.results.store import StoredRun
from shardmark.results.verification import LARGEST, Cause, Check, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictLine:
    """One verified strategy on so many ranks."""

    place: str
    word: str
    mood: str
    """`good`, `bad` or `unsure`."""
    worst: str
    """Of what rounding may make; `-` where nothing was compared so."""
    cause: Cause | None
    """Why it deviates, or was not tried."""
    checks: Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """All verdicts of one run."""

    run: str
    """Its name where several runs are reported, else empty."""
    reference: str
    steps: int
    verdicts: tuple[VerdictLine, ...]


def verified(runs: Sequence[StoredRun]) -> list[Verified]:
    """The stored verdicts of each run that has some, few ranks before many."""
    return [
        Verified(
            run=run.name if len(runs) > 1 else "",
            reference=run.verification.reference,
            steps=run.verification.steps,
            verdicts=tuple(map(_line, sorted(run.verification.verdicts, key=_order))),
        )
        for run in runs
        if run.verification is not None
    ]


def _order(verdict: Verdict) -> tuple[object, ...]:
    return (
        plain(verdict.varied),
        verdict.strategy,
        plain(verdict.strategy_options),
        verdict.world_size,
    )


def _line(verdict: Verdict) -> VerdictLine:
    word, mood = _word(verdict)
    compared = bool(verdict.checks) and verdict.guarantee is None
    deviates = verdict.equivalent is False or not verdict.checks
    told = deviates and verdict.cause is not None and verdict.cause.text != word
    place = _place(verdict)
    return VerdictLine(
        place=place,
        word=word,
        mood=mood,
        worst=_worst(verdict.worst) if compared else NOTHING,
        cause=verdict.cause if told else None,
        checks=table_of(f"Checks of {place}", verdict.checks, _CHECK_COLUMNS),
    )


def _place(verdict: Verdict) -> str:
    options = ", ".join(f"{key}={plain(value)}" for key, value in verdict.strategy_options.items())
    label = f"{verdict.strategy} ({options})" if options else verdict.strategy
    ranks = "1 rank" if verdict.world_size == 1 else f"{verdict.world_size} ranks"
    varied = "".join(f", {title_of(key)}={plain(value)}" for key, value in verdict.varied.items())
    return f"{label} on {ranks}, {verdict.precision}{varied}"


def _word(verdict: Verdict) -> tuple[str, str]:
    if verdict.equivalent is not None:
        return ("equivalent", "good") if verdict.equivalent else ("not equivalent", "bad")
    if verdict.guarantee is not None:
        return f"differs by design: {verdict.guarantee}", "unsure"
    return "not tried", ""


def _worst(tolerances: float | None) -> str:
    if tolerances is None:
        return NOTHING
    return f"{tolerances:.2g}" if tolerances < LARGEST else "not finite"


def _value(value: float | str) -> Value:
    return value if isinstance(value, str) else f"{value:.6g}"


def _column(title: str) -> Column:
    return Column(key=title, title=title, numeric=False)


def _tolerance(check: Check) -> str:
    return "" if check.tolerance is None else f"{check.tolerance:.3g}"


_CHECK_COLUMNS = (
    (_column("check"), lambda check: check.name),
    (_column("result"), lambda check: "holds" if check.holds else "deviates"),
    (_column("found"), lambda check: _value(check.found)),
    (_column("expected"), lambda check: _value(check.expected)),
    (_column("tolerance"), _tolerance),
    (_column("where"), lambda check: check.where or ""),
)
