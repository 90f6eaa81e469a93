"""The matrix of trainers is resumable, and calls wrong only what is confirmed."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

# The folder of the scripts has the name of the command, which mypy takes for it.
trainers: Any = import_module("benchmarks.trainers")
REPORT = {
    "same": False,
    "answer": "2 ranks do not train what one process trains: the gradient is 2 times too large",
    "findings": [{"name": "summed", "deviation": "2 times too large", "evidence": "2.0"}],
    "checks": [
        {"name": "weights", "found": 1e-7},
        {"name": "gradient", "found": 1.0},
        {"name": "learning rate", "found": "0.001"},
    ],
    "method": "replay",
    "frameworks": ["DDP"],
    "notes": [],
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that the benchmark starts; none of them runs."""
    commands: list[list[str]] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if "audit" in command:
            document = json.dumps({"audits": [REPORT]})
            return subprocess.CompletedProcess(command, 1, document, "")
        return subprocess.CompletedProcess(command, 1, "step 1: 2 and 1\n", "")

    monkeypatch.setattr(trainers, "run", run)
    monkeypatch.setattr(trainers, "surroundings", lambda: None)
    monkeypatch.setattr(trainers, "surroundings_line", lambda _: "a machine")
    return commands


def measure(monkeypatch: pytest.MonkeyPatch, page: Path, *cells: str) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
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
    assert audit[-5:] == [audit[-5], "--parallel", "ddp", "--habit", "clip"]
    assert [Path(audit[-5]).name, confirmation[2]] == ["trl_sft.py"] * 2
    assert "by hand" in page.read_text()
    assert page.read_text().count("**`summed`**") == 1
    monkeypatch.setattr(trainers, "versions_of", lambda _: {"trl": "0"})
    measure(monkeypatch, page, "trl_sft:ddp:clip")
    assert len(started) == 4


def test_what_is_not_confirmed_is_not_called_wrong() -> None:
    result = subprocess.CompletedProcess("", 1, json.dumps({"audits": [REPORT]}), "")
    row: dict[str, Any] = trainers.answer_of(result)
    assert row["largest"] == 1.0
    assert trainers.short(row | {"confirmed": False}) == "`summed`, not confirmed"
    assert trainers.short(row | {"confirmed": True}) == "**`summed`**"


def test_an_error_is_the_reason_that_nothing_can_be_told() -> None:
    row = trainers.answer_of(subprocess.CompletedProcess("", 2, "", "a\nit does not run\n"))
    assert (trainers.short(row), row["answer"]) == ("?", "it does not run")


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
