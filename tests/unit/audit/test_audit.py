"""Answers of the audit for records that the test writes in place of the script's ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmark.audit import causes
from shardmark.audit.audit import AuditReport, Started, audit_script
from shardmark.audit.comparison import Records
from shardmark.audit.plan import Plan, rank_file
from shardmark.audit.record import Record, Step
from shardmark.cli import main
from shardmark.core.errors import InputError
from shardmark.scripts.command import ScriptCommand, parse_command


class Ended(Started):
    """A start whose processes have ended."""

    def __init__(self, log: Path) -> None:
        log.write_text("the last line")
        self.log = log

    def wait(self, seconds: float) -> int | None:  # noqa: ARG002
        return 0


def audited(*records: Record) -> AuditReport:
    def start(_command: ScriptCommand, _ranks: int, plan: Plan, log: Path) -> Started:
        for record in records:
            record.save(rank_file(plan.directory, record.rank))
        return Ended(log)

    return audit_script(parse_command(["train.py"]), ranks=2, start=start)


def test_a_rank_that_does_not_train_is_named() -> None:
    with pytest.raises(InputError, match="rank 1 takes no optimizer step"):
        audited(Record(rank=0, ranks=2, steps=[Step()]))


def test_the_refusal_of_one_rank_is_the_answer() -> None:
    report = audited(Record(rank=0, ranks=2, refusal="two optimizers take steps"))
    assert report.same is None
    assert "two optimizers take steps" in report.answer


def records(*ranks: Step, replay: Step) -> Records:
    names = ["weight"]
    return Records(
        ranks=[
            Record(rank=n, ranks=len(ranks), names=names, steps=[s]) for n, s in enumerate(ranks)
        ],
        replay=Record(rank=0, ranks=1, names=names, steps=[replay]),
        disturbed=None,
    )


def step(**settings: float) -> Step:
    return Step(settings=[{"lr": 0.1}, {"lr": 0.2, "weight_decay": 0.1, **settings}])


def test_the_learning_rate_of_a_later_group_is_compared() -> None:
    both = records(step(lr=0.4), step(lr=0.4), replay=step())
    assert both.replay is not None
    finding = causes.of_rates(both, both.replay)
    assert finding is not None
    assert (finding.name, "0.4" in finding.evidence) == ("learning_rate_scaled", True)
    assert causes.of_settings(both, both.replay) is None


@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_settings_of_the_optimizer_that_differ_by_rank_are_named(key: str) -> None:
    both = records(step(), step(**{key: 0.4}), replay=step())
    assert both.replay is not None
    finding = causes.of_settings(both)
    assert finding is not None
    assert finding.name == "settings_differ"
    assert key in finding.deviation
    assert "0.4" in finding.evidence
    assert causes.of_rates(both, both.replay) is None


def test_a_weight_decay_that_follows_the_number_of_ranks_is_named() -> None:
    both = records(step(weight_decay=0.2), step(weight_decay=0.2), replay=step())
    finding = causes.of_settings(both, both.replay)
    assert finding is not None
    assert finding.name == "settings_depend_on_ranks"
    assert "0.2 on 2 ranks, 0.1 in one process" in finding.evidence


@pytest.mark.parametrize("rounded", [True, False])
def test_zeros_do_not_count_as_rounded_gradients(rounded: bool) -> None:
    exact = torch.zeros(1000)
    exact[:50] = torch.linspace(1.0, 2.0, 50) ** 3
    off = exact.bfloat16().float() if rounded else exact * torch.linspace(0.999, 1.001, 1000)
    gradients: list[Tensor | None] = [off]
    both = records(Step(gradients=gradients), Step(gradients=gradients),
                   replay=Step(gradients=[exact]))  # fmt: skip
    assert both.replay is not None
    finding = causes.of_gradient(both, both.replay, lambda: False)
    assert (finding is not None and finding.name == "precision") == rounded


def test_json_has_the_reports_before_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def audit(command: ScriptCommand, *, ranks: int, **_: Any) -> AuditReport:
        if ranks > 2:
            raise InputError("command", "its 3 ranks fail", "use 2")
        return AuditReport(
            command=command.text,
            ranks=ranks,
            steps=3,
            same=True,
            answer="yes",
            findings=(),
            checks=(),
            method="replay",
            frameworks=("torch",),
            notes=(),
        )

    monkeypatch.setattr("shardmark.audit.audit.audit_script", audit)
    assert main(["audit", "--ranks", "2,3", "--format", "json", "train.py"]) == 2
    printed = capsys.readouterr()
    (report,) = json.loads(printed.out)["audits"]
    assert report["ranks"] == 2
    assert "its 3 ranks fail" in printed.err


def test_a_script_that_does_not_exist_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["audit", "--", "torchrun", "--nproc-per-node", "2", "nowhere.py"]) == 2
    assert "no file 'nowhere.py'" in capsys.readouterr().err


def test_the_guide_lists_every_cause() -> None:
    guide = Path(__file__).parents[3] / "docs" / "guides" / "is-my-script-right.md"
    rows = guide.read_text().split("## Causes")[1].split("## ")[0].splitlines()
    columns = [row.split("|")[1] for row in rows if row.startswith("| `")]
    listed = re.findall(r"`(\w+)`", " ".join(columns))
    assert sorted(listed) == sorted(causes.CAUSES)
