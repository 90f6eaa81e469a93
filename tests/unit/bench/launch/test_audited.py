"""Verdicts on the cells of scripts, from reports of the audit that the test makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from shardmark.audit.audit import AuditReport
from shardmark.audit.causes import Finding
from shardmark.audit.script import Against
from shardmark.base.errors import InputError
from shardmark.base.results.verification import Verdict, is_undecided, verdict_text
from shardmark.bench.launch.audited import audit_cells, first_command
from shardmark.bench.launch.listener import ProgressListener
from shardmark.bench.launch.trial_queue import time_lines
from shardmark.bench.launch.verification import cells_of, decides
from shardmark.experiment.load import from_mapping
from shardmark.experiment.matrix import expand
from shardmark.ranks.trial import Trial, trial_id
from shardmark.scripts.command import ScriptCommand
from tests import present

FINDING = Finding(
    name="same_samples",
    deviation="all ranks train on the same samples",
    reason="the samples are not divided among the ranks",
    remedy="give the DataLoader a DistributedSampler",
    evidence="16 of 16",
)


def audited(command: str, *, ranks: int, against: Against | None = None, **_: Any) -> AuditReport:
    """A report on a command by itself; of those compared with another one, `other` differs."""
    if against is not None:
        command = "wrong" if "other" in command else "right"
    elif "other" in command:
        command = "right"
    if "fails" in command:
        raise InputError("command", "it ended with exit code 1", "its output says: KeyError")
    same = None if "dropout" in command else "wrong" not in command
    return AuditReport(
        command=command,
        ranks=ranks,
        steps=3,
        same=same,
        answer=f"the answer for {command}: B does not train what A trains (A: 1)",
        findings=(FINDING,) if same is False else (),
        checks=(),
        method="replay",
        frameworks=("torch",),
        notes=(),
        against="" if against is None else against.command.text,
    )


def test_what_a_script_compiles_itself_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant of it that `--improve` compiles is compared with dynamo."""
    monkeypatch.setattr(
        "shardmark.audit.script.audit_script",
        lambda command, **more: replace(
            audited(command.text, **more),
            uncompiled="" if "compile" in more["interventions"] else "train.py:3",
        ),
    )
    variants = {"unchanged": "", "fused": "%fused", "compile": "%fused,compile"}
    mapping = {
        "name": "tested",
        "workload": {"name": "script", "command": "train.py"},
        "matrix": {"variant": variants, "world_size": [2]},
    }
    plan = expand(from_mapping(mapping))
    cells, first = cells_of(plan.trials), first_command(plan)
    verdicts = {v.strategy: v for v in audit_cells(cells, ProgressListener(), first=first)}
    assert [verdicts[name].equivalent for name in variants] == [True, True, True]
    uncompared = ("compiled (train.py:3), which was not compared",)
    assert [verdicts[name].mathematics for name in variants] == [uncompared, uncompared, ()]


def test_answers_of_the_audit_are_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single rank is compared with the first variant; an unknown answer is undecided."""
    monkeypatch.setattr(
        "shardmark.audit.script.audit_script",
        lambda command, **more: audited(command.text, **more),
    )
    variants = dict.fromkeys(("right", "wrong", "dropout", "fails", "other"))
    mapping = {
        "name": "tested",
        "workload": {"name": "script", "command": "train.py"},
        "matrix": {"variant": {name: name for name in variants}, "world_size": [1, 2]},
        "placement": {"nodes": 1},
    }
    plan = expand(from_mapping(mapping))
    cells, first = cells_of(plan.trials), first_command(plan)
    verdicts = {
        (v.strategy, v.world_size): v for v in audit_cells(cells, ProgressListener(), first=first)
    }
    assert {key: verdict.equivalent for key, verdict in verdicts.items()} == {
        **{(name, 1): name != "other" for name in variants},
        ("other", 2): False,
        ("right", 2): True,
        ("wrong", 2): False,
        ("dropout", 2): None,
        ("fails", 2): None,
    }
    causes = {name: verdicts[name, 2].cause for name in variants}
    assert causes["right"] is None
    assert causes["wrong"] is not None
    assert causes["wrong"].text == FINDING.reason
    for part in (FINDING.deviation, FINDING.evidence, FINDING.remedy):
        assert part in causes["wrong"].evidence
    assert (
        "it does not train what `train.py right` trains (`train.py right`: 1)"
        in present(causes["other"]).text
    )
    assert is_undecided(verdicts["dropout", 2])
    assert "exit code 1" in present(causes["fails"]).evidence
    assert verdict_text(verdicts["fails", 2]) == "not tried"


def test_an_accepted_cause_is_no_deviation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stored verdict answers for another list of accepted causes only if it needed none."""

    def report(command: ScriptCommand, *, accept: Sequence[str], **_: Any) -> AuditReport:
        accepted = "batch_norm_of_share" in accept
        share = replace(FINDING, name="batch_norm_of_share", reason="batch norm is of a share")
        made = audited(command.text, ranks=2)
        if "norm" not in command.text:
            return made
        if accepted:
            return replace(made, accepted=(share,))
        return replace(made, same=False, findings=(share,))

    monkeypatch.setattr("shardmark.audit.script.audit_script", report)

    def cells_and_verdicts(accept: list[str] | None) -> list[tuple[Trial, Verdict]]:
        mapping = {
            "name": "tested",
            "workload": {"name": "script", "command": "train.py"},
            "matrix": {"variant": {"norm": "norm", "right": "right"}, "world_size": [2]},
            "measure": {"accept": accept},
        }
        plan = expand(from_mapping(mapping))
        cells, first = cells_of(plan.trials), first_command(plan)
        return list(zip(cells, audit_cells(cells, ProgressListener(), first=first), strict=True))

    strict, loose = cells_and_verdicts([]), cells_and_verdicts(None)  # null: what is usual
    assert [verdict.equivalent for _, verdict in strict] == [False, True]
    assert [verdict.equivalent for _, verdict in loose] == [True, True]
    assert [verdict.mathematics for _, verdict in loose] == [("batch norm is of a share",), ()]
    assert "--accept batch_norm_of_share" in present(strict[0][1].cause).text
    assert [trial_id(cell) for cell, _ in strict] == [trial_id(cell) for cell, _ in loose]
    for cells, verdicts, expected in (
        (strict, strict, [True, True]),
        (strict, loose, [False, True]),
        (loose, strict, [False, True]),
        (loose, loose, [True, True]),
    ):
        pairs = zip(cells, verdicts, strict=True)
        first = verdicts[0][1].against
        assert [decides(v, cell, first) for (cell, _), (_, v) in pairs] == expected


def test_only_scripts_have_accepted_causes() -> None:
    with pytest.raises(InputError, match="measure: accept is set, which is for scripts"):
        from_mapping(
            {
                "name": "tested",
                "workload": {"name": "classification", "dataset": "random", "model": "resnet18"},
                "recipe": {"steps": 4, "global_batch": 4, "optimizer": {"name": "sgd", "lr": 0.1}},
                "matrix": {"strategy": ["single"], "world_size": [1]},
                "measure": {"accept": ["precision"]},
            }
        )


def test_the_cost_of_audits_is_said_before_the_first_trial() -> None:
    mapping = {
        "name": "never-run",
        "workload": {"name": "script", "command": "train.py"},
        "matrix": {"variant": {"a": "a", "b": "b"}, "world_size": [1, 2]},
    }
    trials = expand(from_mapping(mapping)).trials
    _, line = time_lines(trials, None, None, verify=True)
    assert line.startswith("2 audits before the first trial")
    assert len(time_lines(trials, None, None, verify=False)) == 1
