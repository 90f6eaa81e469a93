"""Checks for the tests of other projects."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.base.evidence.accepted import USUAL
from shardmark.scripts.recording import STEPS


def same_training(
    command: str | Sequence[str],
    *,
    ranks: int = 2,
    steps: int = STEPS,
    accept: Sequence[str] = (),
    strict: bool = False,
    against: str | Sequence[str] | None = None,
) -> None:
    """Fail unless a training script on several ranks trains what one process trains.

    With `against`, another command: fail unless the script trains what that one trains, each on the
    number of ranks of its command.

    `command` is the training command as it is typed, such as `"torchrun train.py --epochs 1"`; it
    runs on this machine, unchanged, for the first steps.  `accept` names causes that are no fault
    here, such as `"local_steps"`: everything else is still compared.  Batch norm of each rank's
    samples is accepted unless `strict`.  Raises
    `AssertionError` with the answer of `shardmark audit` if the training deviates or if that cannot
    be told, and `InputError` if the script does not run.
    """
    from shardmark.audit.script import Against, audit_script
    from shardmark.scripts.command import parse_command

    script, other = parse_command(command), None
    if against is not None:
        reference = parse_command(against)
        other = Against(command=reference, ranks=reference.ranks or 1)
        ranks = script.ranks or 1
    chosen = [*accept, *([] if strict else USUAL)]
    report = audit_script(script, ranks=ranks, steps=steps, accept=chosen, against=other)
    if not report.same:
        raise AssertionError(report.answer)
