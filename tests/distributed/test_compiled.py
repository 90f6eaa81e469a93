"""The audit compares a model that is compiled for it, and says so of one that compiles itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmark.audit.audit import AuditReport
from shardmark.audit.script import Against, audit_script
from shardmark.base.errors import InputError
from shardmark.scripts.command import parse_command

SCRIPT = str(Path(__file__).with_name("compiled_script.py"))


def compared(interventions: str, *, b: str = "") -> AuditReport:
    a = Against(command=parse_command(SCRIPT), ranks=2)
    command = parse_command(f"{SCRIPT} {b}")
    return audit_script(command, ranks=2, steps=2, against=a, interventions=interventions)


def test_a_compiled_model_draws_and_trains_the_same() -> None:
    report = compared("%compile=aot_eager")
    assert report.same, report.answer
    assert "1 compiled graph" in report.answer
    assert not report.uncompiled
    assert len(report.checks) > 3


@pytest.mark.parametrize("backend", ["without_dropout", "of_an_evaluation"])
def test_a_compiled_model_that_trains_something_else_is_discarded(backend: str) -> None:
    report = compared(f"%compile={backend}")
    assert report.same is False
    assert "gradient is off" in report.answer


def test_a_model_that_cannot_be_compiled_is_not_judged() -> None:
    with pytest.raises(InputError, match="no compiler is installed"):
        compared("%compile=failing")


def test_a_script_that_compiles_itself_is_said_to_be_compared_without() -> None:
    report = compared("", b="--itself")
    assert report.same
    line = Path(SCRIPT).read_text().splitlines()[int(report.uncompiled.rpartition(":")[2]) - 1]
    assert "compile(" in line
    assert any("torch.compile" in note for note in report.notes)
