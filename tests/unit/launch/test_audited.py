"""Verdicts on the cells of scripts, from reports of the audit that the test makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardmark.audit.audit import AuditReport
from shardmark.audit.causes import Finding
from shardmark.config.load import from_mapping
from shardmark.core.errors import InputError
from shardmark.launch.audited import audit_cells
from shardmark.launch.listener import NullListener
from shardmark.launch.verification import cells_of
from shardmark.results.verification import is_undecided, verdict_text
from shardmark.trials.matrix import expand

if TYPE_CHECKING:
    import pytest

FINDING = Finding(
    name="same_samples",
    deviation="all ranks train on the same samples",
    reason="the samples are not divided among the ranks",
    remedy="give the DataLoader a DistributedSampler",
    evidence="16 of 16",
)


def audited(command: str, *, ranks: int, **_: Any) -> AuditReport:
    if "fails" in command:
        raise InputError("command", "it ended with exit code 1", "its output says: KeyError")
    same = None if "dropout" in command else "wrong" not in command
    return AuditReport(
        command=command,
        ranks=ranks,
        steps=3,
        same=same,
        answer=f"the answer for {command}",
        findings=(FINDING,) if same is False else (),
        checks=(),
        method="replay",
        frameworks=("torch",),
        notes=(),
    )


def test_answers_of_the_audit_are_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank needs no audit, and what cannot be told is undecided."""
    monkeypatch.setattr(
        "shardmark.audit.audit.audit_script",
        lambda command, **more: audited(command.text, **more),
    )
    variants = dict.fromkeys(("right", "wrong", "dropout", "fails"))
    mapping = {
        "name": "tested",
        "workload": {"name": "script", "command": "train.py"},
        "matrix": {"variant": {name: name for name in variants}, "world_size": [1, 2]},
        "placement": {"nodes": 1},
    }
    cells = cells_of(expand(from_mapping(mapping)).trials)
    verdicts = {(v.strategy, v.world_size): v for v in audit_cells(cells, NullListener())}
    assert {key: verdict.equivalent for key, verdict in verdicts.items()} == {
        **{(name, 1): True for name in variants},
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
    assert is_undecided(verdicts["dropout", 2])
    assert causes["fails"] is not None
    assert "exit code 1" in causes["fails"].evidence
    assert verdict_text(verdicts["fails", 2]) == "not tried"
