"""Verdicts on scripts, as `shardmark audit` finds them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardmark.base.errors import InputError
from shardmark.base.masking import shown_command
from shardmark.base.results.verification import NOT_TRIED, Cause, Verdict
from shardmark.bench.launch.listener import ProgressListener
from shardmark.bench.launch.trial_queue import cell_of
from shardmark.experiment.matrix import TrialPlan
from shardmark.ranks.trial import Trial
from shardmark.scripts.recording import LONGEST_SECONDS

if TYPE_CHECKING:
    from shardmark.audit.audit import AuditReport

ONE_MACHINE = "the audit runs on one machine"


def first_command(plan: TrialPlan) -> str:
    """Return the command that the other variants of a script are compared with."""
    scripts = ((trial.strategy.name, trial.script) for trial in plan.trials)
    commands = {name: script.command for name, script in scripts if script is not None}
    return commands[plan.strategies[0]] if commands else ""


def audit_cells(
    cells: Sequence[Trial], listener: ProgressListener, *, first: str
) -> Iterator[Verdict]:
    """Yield a verdict on each cell of scripts; it is undecided if the audit cannot run or tell.

    A cell trains what it trains in one process, and what the `first` command trains.
    """
    for number, cell in enumerate(cells, start=1):
        assert cell.script is not None
        place = f"[{number}/{len(cells)}] {cell.title}"
        reports: list[AuditReport | str] = []
        if cell.nodes > 1:
            reports = [ONE_MACHINE]
        elif cell.world_size > 1 and not cell.script.interventions:
            listener.doing(f"auditing {place}")
            reports = [_audited(cell)]
        if cell.nodes == 1 and cell.script.command != first:
            listener.doing(f"comparing with {shown_command(first)} {place}")
            reports.append(_audited(cell, first))
        answers = [None if isinstance(report, str) else report.same for report in reports]
        same = False if False in answers else None if None in answers else True
        written = [report for report in reports if not isinstance(report, str)]
        yield Verdict(
            id=cell_of(cell),
            strategy=cell.strategy.name,
            strategy_options={},
            world_size=cell.world_size,
            precision=cell.precision,
            varied=cell.varied,
            equivalent=same,
            checks=tuple(check for report in written[-1:] for check in report.checks),
            cause=None if same else _cause(reports[answers.index(same)], first),
            mathematics=(
                *(f.reason for report in written for f in report.accepted),
                *{
                    f"compiled ({r.uncompiled}), which was not compared"
                    for r in written
                    if r.uncompiled
                },
            ),
            accept=cell.measure.accepted,
            against=first,
        )


def _audited(cell: Trial, first: str = "") -> AuditReport | str:
    """Return the report, or why there is none."""
    from shardmark.audit.script import Against, audit_script  # imports torch

    assert cell.script is not None
    reference, revision = cell.script.model_copy(update={"command": first}), cell.script.revision
    try:
        against = None
        if first:
            against = Against(command=reference.parsed(), ranks=cell.world_size, revision=revision)
        return audit_script(
            cell.script.parsed(), ranks=cell.world_size, accept=cell.measure.accepted,
            longest_seconds=min(LONGEST_SECONDS, cell.limits.trial_seconds),
            writes_are_fine=cell.script.writes_are_fine, against=against, revision=revision,
            interventions=cell.script.interventions,
        )  # fmt: skip
    except InputError as error:
        return str(error)


def _cause(report: AuditReport | str, first: str) -> Cause:
    if isinstance(report, str):
        return Cause(text=NOT_TRIED, evidence=report, first_deviation="none")
    deviating = next((check.name for check in report.checks if not check.holds), "none")
    text, evidence = report.answer, report.method
    if report.against:
        text = re.sub(r"\bA\b", shown_command(first), re.sub(r"\bB\b", "it", text))
        return Cause(text=text, evidence=evidence, first_deviation=deviating)
    for finding in report.findings[:1]:
        text = finding.reason
        evidence = f"{finding.deviation}; {finding.evidence}; remedy: {finding.remedy}"
        if report.acceptable:
            text += f"; if it is on purpose: --accept {report.acceptable} (measure.accept)"
    return Cause(text=text, evidence=evidence, first_deviation=deviating)
