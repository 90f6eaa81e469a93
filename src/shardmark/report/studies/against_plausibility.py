"""Published figures that arithmetic contradicts, as a table with the reasoning below it."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.analysis.studies.against import Against
from shardmark.analysis.studies.plausibility import Examined, Finding, plausibility_of
from shardmark.core.metrics import METRICS
from shardmark.report.studies.against_labels import printed
from shardmark.report.table.sections import Section
from shardmark.report.table.sections import TextColumn as Column
from shardmark.report.table.sections import TextTable as Table
from shardmark.report.table.table import number

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
_PERCENTAGES = ("accuracy_top1", "accuracy_top5", "scaling_efficiency")


def plausibility_section(against: Against) -> Section:
    """One line a finding; the notes say what follows, how it was computed, what was looked at."""
    checks = plausibility_of(against)
    findings = [one for check in checks for one in check.findings]
    columns = (
        _words("check", [one.check.name for one in findings]),
        _words("published figure", [one.subject for one in findings]),
        Column(title="publ.", cells=tuple(map(_published, findings))),
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


def shown(value: float, metric: str, digit: float | None = None) -> str:
    """The number with its unit, to the study's last digit where it is given."""
    unit = METRICS[metric].unit
    if unit == "bytes":
        name, size = next((one for one in _BYTES if abs(value) >= one[1]), _BYTES[-1])
        text = printed(value, digit, 1 / size)
        return f"{text or number(value / size, decimals=2 if name == 'GB' else 1)} {name}"
    if metric in _PERCENTAGES:
        return f"{printed(value, digit, 100) or number(value * 100, decimals=1)} %"
    text = printed(value, digit) or number(value, decimals=_DECIMALS.get(metric))
    return f"{text} s" if unit == "seconds" else text


def _words(title: str, cells: Sequence[str]) -> Column:
    return Column(title=title, cells=tuple(cells), numeric=False)


def _published(finding: Finding) -> str:
    return shown(finding.published, finding.metric, finding.digit)


def _limit(finding: Finding) -> str:
    return f"{finding.side} {shown(finding.limit, finding.metric, finding.limit_digit)}"


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
    what = "claim" if check.name.endswith("words claim") else "figure"
    count = f"{_count(len(findings), 'finding')}, {_count(examined.figure_count, what)} examined"
    return [
        f"{check.name.capitalize()} ({count}): {check.formula}. Assumed: {check.assumption}."
        f" {_margin(check.margin)}",
        *(_of_finding(one) for one in findings),
    ]


def _count(number_of: int, what: str) -> str:
    return f"{number_of} {what}{'' if number_of == 1 else 's'}"


def _margin(margin: float) -> str:
    return f"Margin {margin:.0%}, beside rounding." if margin else "No margin beside rounding."


def _of_finding(one: Finding) -> str:
    parts = "; ".join(f"{name} {shown(value, one.metric)}" for name, value in one.parts)
    words = f" (stated, in short: {one.words})" if one.words else ""
    return (
        f"{one.subject}{words}: {_published(one)} ({one.place}); expected is"
        f" {_limit(one)} ({one.basis}{f'; {parts}' if parts else ''}): {one.meaning}."
    )


def _finding_json(one: Finding) -> dict[str, object]:
    return {
        "subject": one.subject,
        "words": one.words,
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
