"""The matrix of trainers is resumable, and calls wrong only what is confirmed."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardmark.base.errors import InputError
from shardmark.scripts.command import ScriptCommand
from tests import ROOT

# The folder of the scripts has the name of the command, which mypy takes for it.
trainers: Any = import_module("benchmarks.trainers")
FINDING = SimpleNamespace(name="summed", deviation="2 times too large", evidence="2.0")
REPORT = SimpleNamespace(
    same=False,
    answer="2 ranks do not train what one process trains: the gradient is 2 times too large",
    findings=[FINDING],
    checks=[SimpleNamespace(found=found) for found in (1e-7, 1.0, "0.001")],
    method="replay",
    frameworks=["DDP"],
    notes=[],
)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Words that the benchmark audits and confirms; none of them runs."""
    commands: list[list[str]] = []

    def audit(command: ScriptCommand, *, until_epoch: bool, **_: Any) -> SimpleNamespace:
        commands.append([*command.script, *["--until-epoch"] * until_epoch])
        return REPORT

    def confirm(words: list[str], _: Any) -> tuple[bool, list[str]]:
        commands.append(words)
        return True, ["step 1: 2 and 1"]

    monkeypatch.setattr(trainers, "audit_script", audit)
    monkeypatch.setitem(trainers.CONFIRM, "confirm", confirm)
    monkeypatch.setattr(trainers, "surroundings", lambda: None)
    monkeypatch.setattr(trainers, "surroundings_line", lambda _: "a machine")
    return commands


def measure(monkeypatch: pytest.MonkeyPatch, page: Path, *cells: str) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"PYTHONPATH": ""})
    monkeypatch.setattr(sys, "argv", ["", "--out", str(page), "--cells", *cells])
    trainers.main()


def test_a_finished_cell_is_not_audited_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[list[str]]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Trainers\n\nby hand\n")
    for _ in range(2):
        measure(monkeypatch, page, "trl_sft:ddp:clip")
    audit, confirmation = started
    assert [Path(audit[0]).name, *audit[1:]] == confirmation
    assert confirmation == ["trl_sft.py", "--parallel", "ddp", "--habit", "clip"]
    assert "by hand" in page.read_text()
    assert page.read_text().count("**`summed`**") == 1
    monkeypatch.setattr(trainers, "versions_of", lambda _: {"trl": "0"})
    measure(monkeypatch, page, "trl_sft:ddp:clip")
    assert len(started) == 4


def test_what_is_not_confirmed_is_not_called_wrong(started: list[list[str]]) -> None:
    row: dict[str, Any] = trainers.answer_of(["trl_sft.py"], until_epoch=False)
    assert row["largest"] == 1.0
    assert trainers.short(row | {"confirmed": False}) == "`summed`, not confirmed"
    assert trainers.short(row | {"confirmed": True}) == "**`summed`**"
    assert len(started) == 1


def test_an_error_is_the_reason_that_nothing_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise InputError("command", str(ROOT / "train.py"), "mend that error first")

    monkeypatch.setattr(trainers, "audit_script", fail)
    row = trainers.answer_of(["trl_sft.py"], until_epoch=False)
    assert trainers.short(row) == "?"
    assert row["answer"] == "command: train.py; mend that error first"


def test_a_failure_without_hooks_confirms_nothing(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no step")

    monkeypatch.setitem(trainers.CONFIRM, "confirm", fail)
    (cell,) = trainers.cells(["accelerate"], ["*:ddp:plain"])
    row = trainers.audited(cell)
    assert (row["confirmed"], row["without_hooks"]) == (False, ["no step"])
    assert len(started) == 1


def test_the_epoch_is_audited_until_its_end(started: list[list[str]]) -> None:
    (cell,) = trainers.cells(["accelerate"], ["*:ddp:epoch"])
    assert trainers.audited(cell)["confirmed"]
    assert "--until-epoch" in started[0]


def test_cells_have_the_order_of_the_patterns() -> None:
    chosen = trainers.cells([], ["trl_dpo:zero1:clip", "trl_sft:*:clip", "trl_*:ddp:clip"])
    names = [cell.name for cell in chosen]
    assert names[:2] == ["trl_dpo:zero1:clip", "trl_sft:ddp:clip"]
    assert names.count("trl_sft:ddp:clip") == names.count("trl_dpo:ddp:clip") == 1


def test_another_folder_is_looked_in_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch-0.1.dist-info").mkdir()
    (tmp_path / "torch-0.1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 0.1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert trainers.versions_of(["torch", "no-such"]) == {"torch": "0.1", "no-such": "missing"}
