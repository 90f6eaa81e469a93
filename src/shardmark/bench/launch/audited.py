"""Verdicts on scripts, as `shardmark audit` finds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardmark.base.errors import InputError
from shardmark.base.results.verification import NOT_TRIED, Cause, Verdict
from shardmark.bench.launch.listener import ProgressListener
from shardmark.bench.launch.trial_queue import cell_of
from shardmark.ranks.trial import Trial
from shardmark.scripts.recording import LONGEST_SECONDS

if TYPE_CHECKING:
    from shardmark.audit.audit import AuditReport

ONE_MACHINE = "the audit runs on one machine"


def audit_cells(cells: Sequence[Trial], listener: ProgressListener) -> Iterator[Verdict]:
    """Yield a verdict on each cell of scripts; it is undecided if the audit cannot run or tell."""
    for number, cell in enumerate(cells, start=1):
        report: AuditReport | str = ONE_MACHINE
        if cell.world_size > 1 and cell.nodes == 1:
            listener.doing(f"auditing [{number}/{len(cells)}] {cell.title}")
            report = _audited(cell)
        same = cell.world_size == 1 or (None if isinstance(report, str) else report.same)
        accepted = () if isinstance(report, str) else report.accepted
        yield Verdict(
            id=cell_of(cell),
            strategy=cell.strategy.name,
            strategy_options={},
            world_size=cell.world_size,
            precision=cell.precision,
            varied=cell.varied,
            equivalent=same,
            checks=() if isinstance(report, str) else report.checks,
            cause=None if same else _cause(report),
            mathematics=tuple(finding.reason for finding in accepted),
            accept=cell.measure.accepted,
        )


def _audited(cell: Trial) -> AuditReport | str:
    """Return the report, or why there is none."""
    from shardmark.audit.script import audit_script  # imports torch

    assert cell.script is not None
    longest_seconds = min(LONGEST_SECONDS, cell.limits.trial_seconds)
    try:
        return audit_script(
            cell.script.parsed(),
            ranks=cell.world_size,
            accept=cell.measure.accepted,
            longest_seconds=longest_seconds,
            writes_are_fine=cell.script.writes_are_fine,
        )
    except InputError as error:
        return str(error)


def _cause(report: AuditReport | str) -> Cause:
    if isinstance(report, str):
        return Cause(text=NOT_TRIED, evidence=report, first_deviation="none")
    deviating = next((check.name for check in report.checks if not check.holds), "none")
    text, evidence = report.answer, report.method
    for finding in report.findings[:1]:
        text = finding.reason
        evidence = f"{finding.deviation}; {finding.evidence}; remedy: {finding.remedy}"
        if report.acceptable:
            text += f"; if it is on purpose: --accept {report.acceptable} (measure.accept)"
    return Cause(text=text, evidence=evidence, first_deviation=deviating)
