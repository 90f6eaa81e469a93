"""Published figures that arithmetic contradicts, as a table with the reasoning below it."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.analysis.against import Against
from shardmark.analysis.plausibility import Examined, Finding, plausibility_of
from shardmark.measure.metrics import METRICS
from shardmark.report.sections import Section
from shardmark.report.tables import Column, Table, number

TITLE = "Plausibility of the published figures"
_BYTES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
"""Decimal, as studies print them."""
_DECIMALS = {
    "map": 4,
    "train_loss": 4,
    "validation_loss": 4,
    "epoch_seconds": 1,
    "total_seconds": 1,
}


def plausibility_section(against: Against) -> Section:
    """One line a finding; the notes say what follows, how it was computed, what was looked at."""
    checks = plausibility_of(against)
    findings = [one for check in checks for one in check.findings]
    columns = (
        _words("check", [one.check.name for one in findings]),
        _words("published figure", [one.subject for one in findings]),
        Column(title="publ.", cells=tuple(shown(one.published, one.metric) for one in findings)),
        Column(title="expected", cells=tuple(_limit(one) for one in findings)),
    )
    shown_columns = columns if findings else ()
    return Section(title=TITLE, table=Table(columns=shown_columns, notes=_notes(checks)))


def plausibility_json(against: Against) -> list[dict[str, object]]:
    """Every check with what it found, base units."""
    return [
        {
            "check": one.check.name,
            "assumption": one.check.assumption,
            "formula": one.check.formula,
            "margin": one.check.margin,
            "figures": one.figure_count,
            "findings": [_finding_json(finding) for finding in one.findings],
        }
        for one in plausibility_of(against)
    ]


def shown(value: float, metric: str) -> str:
    """The number with its unit."""
    unit = METRICS[metric].unit
    if unit == "bytes":
        name, size = next((one for one in _BYTES if abs(value) >= one[1]), _BYTES[-1])
        return f"{number(value / size, decimals=2 if name == 'GB' else 1)} {name}"
    if metric.startswith("accuracy"):
        return f"{number(value * 100, decimals=1)} %"
    text = number(value, decimals=_DECIMALS.get(metric))
    return f"{text} s" if unit == "seconds" else text


def _words(title: str, cells: Sequence[str]) -> Column:
    return Column(title=title, cells=tuple(cells), numeric=False)


def _limit(finding: Finding) -> str:
    return f"{finding.side} {shown(finding.limit, finding.metric)}"


def _notes(checks: Sequence[Examined]) -> tuple[str, ...]:
    looked = [one for one in checks if one.figure_count]
    idle = [one.check.name for one in checks if not one.figure_count]
    notes = [note for one in looked if one.findings for note in _of_check(one)]
    fine = [f"{one.check.name} ({one.figure_count})" for one in looked if not one.findings]
    return (
        *notes,
        *([f"Not contradicted, with the number of figures: {'; '.join(fine)}."] if fine else []),
        *([f"Nothing in the study to check: {'; '.join(idle)}."] if idle else []),
        "Computed from the study's own figures. A contradiction says that something beside the"
        " named cause is at work, or that a figure is of something else; not which.",
    )


def _of_check(examined: Examined) -> list[str]:
    """How the check computes, then each finding with its numbers."""
    check, findings = examined.check, examined.findings
    count = f"{len(findings)} of {examined.figure_count} figures"
    return [
        f"{check.name.capitalize()} ({count}): {check.formula}. Assumed: {check.assumption}."
        f" Margin {check.margin:.0%}, beside rounding.",
        *(_of_finding(one) for one in findings),
    ]


def _of_finding(one: Finding) -> str:
    parts = "; ".join(f"{name} {shown(value, one.metric)}" for name, value in one.parts)
    return (
        f"{one.subject}: {shown(one.published, one.metric)} ({one.place}); expected is"
        f" {_limit(one)} ({one.basis}{f'; {parts}' if parts else ''}): {one.meaning}."
    )


def _finding_json(one: Finding) -> dict[str, object]:
    return {
        "subject": one.subject,
        "place": one.place,
        "metric": one.metric,
        "unit": METRICS[one.metric].unit,
        "published": one.published,
        "side": one.side,
        "limit": one.limit,
        "basis": one.basis,
        "parts": {name.rstrip(":"): value for name, value in one.parts},
        "meaning": one.meaning,
    }
