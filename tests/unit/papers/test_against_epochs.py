"""The table by epoch beside a study: what it says where one of the two has no epochs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardmark.results.schema import Failure, Outcome
from tests.unit.papers.runs import answer, detection_trial, scaled, write_detection


@pytest.mark.parametrize(
    ("paper", "elsewhere"),
    [("asu-fsdp-2024", "figures of whole trainings"), ("ovi-2025", "claims")],
)
def test_by_epoch_a_study_without_epochs_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, paper: str, elsewhere: str
) -> None:
    """What was measured is there, and the hardware and task that differ."""
    failed = detection_trial("fsdp", 2, outcome=Outcome.FAILED, failure=Failure(reason="x"))
    run = str(write_detection(tmp_path / "run", [*scaled(), failed]))
    text = answer(capsys, run, "--against", paper, "--epochs")
    assert text.startswith(f"Against {paper}, epoch by epoch")
    assert ["ddp", "2", "1", "0.7500", "±0.0000", "10.00", "±0.00", "0.1250", "±0.0000"] in [
        line.split() for line in text.splitlines()
    ]
    assert "publ." not in text
    words = " ".join(text.split())
    assert "other hardware, so that seconds and bytes do not compare" in words
    assert "Another task: workload published classification, measured detection" in words
    assert f"nothing by epoch: what is here was measured. Its {elsewhere} are shown" in words
    assert "Left out, not ok: fsdp on 2 ranks (1 x failed)." in words


def test_by_epoch_a_run_without_epochs_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    steps = detection_trial(recipe={"epochs": None, "steps": 20})
    run = str(write_detection(tmp_path / "run", [steps]))
    words = " ".join(answer(capsys, run, "--against", "ovi-2025", "--epochs").split())
    assert "The study states nothing by epoch" in words
    assert "No epochs: the recipe counts 20 steps and no epochs." in words


def test_epochs_alone_in_every_format(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = str(write_detection(tmp_path / "run", scaled()))
    assert answer(capsys, run, "--epochs").startswith("Epoch by epoch\n\nstrategy  ranks  epoch")
    assert answer(capsys, run, "--epochs", "--format", "markdown").startswith("### Epoch by epoch")
    document = json.loads(answer(capsys, run, "--epochs", "--format", "json"))
    assert len(document["rows"]) == 4
    assert len(document["epochs"]) == 8
    assert len(answer(capsys, run, "--epochs", "--format", "csv").splitlines()) == 9
