"""`shardmark audit`: is an unchanged training script right on N ranks?"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from shardmark.base.errors import InputError
from shardmark.base.masking import masked_command
from shardmark.base.text import counted, say, say_text
from shardmark.cli.arguments import (
    AcceptOption,
    StrictOption,
    TextOrJson,
    WritesOption,
    causes_of,
    numbers_of_ranks,
)
from shardmark.cli.phases import PhaseLines
from shardmark.scripts.recording import LONGEST_SECONDS, STEPS

if TYPE_CHECKING:
    from shardmark.audit.audit import AuditReport
    from shardmark.audit.script import Against
    from shardmark.scripts.command import ScriptCommand

DEVIATES = 1
UNDECIDED = 2


def audit(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND",
            help="The training command as you type it: torchrun, python -m torch.distributed.run, "
            "accelerate launch, deepspeed, fabric run, or a script.",
        ),
    ],
    *,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="N,...", help="Numbers of ranks to try; by default that of the command, or 2."
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Compare with what this command trains, instead of with one process.",
        ),
    ] = None,
    against_revision: Annotated[
        str | None,
        typer.Option(
            metavar="REVISION",
            help="Compare with what the same command trains in this commit of the repository.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, metavar="N", help="Optimizer steps that are compared.")
    ] = STEPS,
    until_epoch: Annotated[
        bool,
        typer.Option(
            "--until-epoch",
            help="Compare the steps from the end of the first epoch on; skip those before.",
        ),
    ] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Seed all ranks, and switch dropout off.")
    ] = False,
    accept: AcceptOption = None,
    strict: StrictOption = False,
    timeout: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="Longest time of each start.")
    ] = LONGEST_SECONDS,
    writes_are_fine: WritesOption = False,
    form: Annotated[TextOrJson, typer.Option("--format", help="json has every check.")] = (
        TextOrJson.TEXT
    ),
) -> None:
    """Run a training script on N ranks, and its first steps again in one process; compare both.

    The script is not changed: hooks of torch record its batches, gradients and weights.  What it
    writes goes to a private copy of the files, which is removed.  Exit code 0 if the ranks train
    what one process trains, 1 if not, 2 if it cannot be told.
    """
    from shardmark.audit.script import audit_script
    from shardmark.base.text import render_json
    from shardmark.scripts.command import parse_command

    parsed = parse_command(command)
    reports: list[AuditReport] = []
    other = _against(against, against_revision, parsed, ranks)
    try:
        for count in _counts(ranks, parsed.ranks) if other is None else [_one_count(ranks, parsed)]:
            report = audit_script(
                parsed, ranks=count, steps=steps, until_epoch=until_epoch,
                deterministic=deterministic, accept=causes_of(accept, strict=strict),
                longest_seconds=timeout, writes_are_fine=writes_are_fine, progress=PhaseLines(),
                against=other,
            )  # fmt: skip
            reports.append(report)
            if form is TextOrJson.TEXT:
                say(*report_lines(report))
    finally:  # a later number of ranks may fail
        if form is TextOrJson.JSON and reports:
            facts = [asdict(report) for report in reports]
            for report, fields in zip(reports, facts, strict=True):
                fields["command"] = masked_command(report.command)
                fields["checks"] = [check.model_dump() for check in report.checks]
            say_text(render_json({"audits": facts}))
    answers = [report.same for report in reports]
    if not all(answers):
        raise typer.Exit(DEVIATES if False in answers else UNDECIDED)


def _counts(text: str | None, of_command: int | None) -> list[int]:
    """Numbers of ranks to try; one rank is what the others are compared with."""
    if text is None:
        return [of_command if of_command is not None and of_command > 1 else 2]
    counts = [number for number in numbers_of_ranks(text) if number > 1]
    if not counts:
        raise InputError("--ranks", text, "at least one number from 2: one rank is the reference")
    return counts


def _against(
    command: str | None, revision: str | None, parsed: ScriptCommand, ranks: str | None
) -> Against | None:
    """Return the script to compare with, which the options name."""
    from shardmark.audit.script import Against, commit_of
    from shardmark.scripts.command import parse_command

    if command is not None and revision is not None:
        raise InputError("--against-revision", revision, "either --against or --against-revision")
    if command is None and revision is None:
        return None
    other = parsed if command is None else parse_command(command)
    commit = "" if revision is None else commit_of(revision)
    return Against(command=other, ranks=_one_count(ranks, other), revision=commit)


def _one_count(text: str | None, command: ScriptCommand) -> int:
    """Number of ranks of a script that is compared with another one."""
    if text is None:
        return command.ranks or 1
    counts = numbers_of_ranks(text)
    if len(counts) > 1:
        raise InputError("--ranks", text, "one number, for both scripts")
    return counts[0]


def report_lines(report: AuditReport) -> list[str]:
    """The answer, and the checks behind it."""
    lines = [report.answer]
    lines += [f"  evidence: {finding.evidence}" for finding in report.findings[:1]]
    lines += [
        "  also: " + ", because ".join(filter(None, (finding.deviation, finding.reason)))
        for finding in report.findings[1:3]
    ]
    lines += [f"  accepted: {cause.name} ({cause.evidence})" for cause in report.accepted]
    if report.acceptable:
        lines.append(f"  if it is on purpose: --accept {report.acceptable}")
    width = max((len(check.name) for check in report.checks), default=0)
    shown = [check for n, check in enumerate(report.checks) if n < 8 or not check.holds]
    for check in shown[:10]:
        word = "holds " if check.holds else "DIFFERS"
        value = check.found if isinstance(check.found, str) else f"off by {check.found:.2g}"
        if isinstance(check.found, str) and check.found != check.expected:
            value += f", expected {check.expected}"
        location = f" ({check.where})" if check.where and not check.holds else ""
        lines.append(f"  {check.name:{width}}  {word:7}  {value}{location}")
    lines += [f"  note: {note}" for note in report.notes]
    lines += [f"  files: {report.writes}"] if report.writes else []
    ranks = f"{counted(report.ranks, 'rank')} of {', '.join(report.frameworks)}"
    lines.append(f"  {ranks}, {counted(report.steps, 'step')}; {report.method}")
    return lines
