"""Whether the strategies of a run train the same thing, as the report page tells it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardmark.analysis.compare.rows import Row, plain
from shardmark.config.axes import title_of
from shardmark.report.table.table import NOTHING
from shardmark.results.store import StoredRun
from shardmark.results.verification import LARGEST, Check, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One line beside the verdict."""

    mood: str
    """`good`, `bad` or `unsure`."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictLine:
    """One verified strategy on so many ranks."""

    place: str
    word: str
    mood: str
    worst: str
    """Of what rounding may make; `-` where nothing was compared so."""
    cause: str
    evidence: str
    first_deviation: str
    setting: str
    checks: tuple[tuple[str, ...], ...]
    """Name, `holds` or `deviates`, found, expected, tolerance, where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """All verdicts of one run."""

    run: str
    """Its name where several runs are reported, else empty."""
    reference: str
    steps: int
    verdicts: tuple[VerdictLine, ...]


def status_of(rows: Sequence[Row]) -> Status:
    """What a reader must know before any number is compared."""
    measured = [row for row in rows if row.outcomes.get("ok")]
    deviating = [row.place for row in measured if row.equivalent is False]
    if deviating:
        return Status(
            mood="bad",
            text=f"Not equivalent, not to be ranked with the others: {'; '.join(deviating)}.",
        )
    if not measured:
        return Status(mood="bad", text="No trial ended ok: there is nothing to compare.")
    weaker = [row for row in measured if row.equivalent is None and row.guarantee]
    less = list(dict.fromkeys(row.label for row in weaker))
    unknown = [row.place for row in measured if row.equivalent is None and not row.guarantee]
    kept = f" Promised less, and kept: {'; '.join(less)}." if less else ""
    if not unknown:
        others = " other" if less else ""
        proven = f"Verified: every{others} strategy trains what the reference trains."
        all_less = len(weaker) == len(measured)
        return Status(mood="good", text=(kept.strip() if all_less else f"{proven}{kept}"))
    if len(unknown) == len(measured):
        return Status(
            mood="unsure",
            text="Not verified: whether the strategies train the same thing is not known here.",
        )
    return Status(mood="unsure", text=f"Not verified: {'; '.join(unknown)}.{kept}")


def verified(runs: Sequence[StoredRun]) -> tuple[Verified, ...]:
    """The stored verdicts of each run that has some."""
    return tuple(
        Verified(
            run=run.name if len(runs) > 1 else "",
            reference=run.verification.reference,
            steps=run.verification.steps,
            verdicts=tuple(_line(verdict) for verdict in _ordered(run.verification.verdicts)),
        )
        for run in runs
        if run.verification is not None
    )


def _ordered(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """As the tables: the baseline first, few ranks before many."""
    return sorted(
        verdicts,
        key=lambda one: (
            plain(one.varied),
            one.strategy != "single",
            one.strategy,
            plain(one.strategy_options),
            one.world_size,
        ),
    )


def _line(verdict: Verdict) -> VerdictLine:
    cause = verdict.cause
    word, mood = _word(verdict)
    told = cause is not None and (verdict.equivalent is False or not verdict.checks)
    deviates = cause is not None and verdict.equivalent is False
    compared = bool(verdict.checks) and verdict.guarantee is None
    return VerdictLine(
        place=_place(verdict),
        word=word,
        mood=mood,
        worst=_worst(verdict.worst) if compared else NOTHING,
        cause=cause.text if cause and told and cause.text != word else "",
        evidence=cause.evidence if cause and told else "",
        first_deviation=cause.first_deviation if cause and deviates else "",
        setting=cause.setting or "" if cause and deviates else "",
        checks=tuple(_check(check) for check in verdict.checks),
    )


def _place(verdict: Verdict) -> str:
    options = ", ".join(f"{key}={plain(one)}" for key, one in verdict.strategy_options.items())
    label = f"{verdict.strategy} ({options})" if options else verdict.strategy
    ranks = "1 rank" if verdict.world_size == 1 else f"{verdict.world_size} ranks"
    varied = "".join(f", {title_of(key)}={plain(value)}" for key, value in verdict.varied.items())
    return f"{label} on {ranks}, {verdict.precision}{varied}"


def _word(verdict: Verdict) -> tuple[str, str]:
    if verdict.equivalent is not None:
        return ("equivalent", "good") if verdict.equivalent else ("not equivalent", "bad")
    if verdict.guarantee is not None:
        return f"promises less: {verdict.guarantee}", "unsure"
    return "not tried", ""


def _worst(tolerances: float | None) -> str:
    if tolerances is None:
        return NOTHING
    return f"{tolerances:.2g}" if tolerances < LARGEST else "not finite"


def _check(check: Check) -> tuple[str, ...]:
    return (
        check.name,
        "holds" if check.holds else "deviates",
        _value(check.found),
        _value(check.expected),
        "" if check.tolerance is None else f"{check.tolerance:.3g}",
        check.where or "",
    )


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"
