"""A run's comparison is stored as Markdown and JSON, and the run as an archive."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.results_table import main

from shardmark.base.results.store import load_run
from tests.bench.test_link_speeds import ENVIRONMENT
from tests.golden.invented import invented_trial, write_run

if TYPE_CHECKING:
    import pytest


def test_a_run_is_stored_beside_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = [invented_trial(name, 2) for name in ("ddp", "fsdp")]
    run = write_run(tmp_path / "run", trials, environment=ENVIRONMENT)
    arguments = ["--against", "ovi-2025", "--command", "shardmark run ovi-2025"]
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["", str(run), "study", "--out", str(out), *arguments])
    main()
    (page,) = out.iterdir()
    assert page.name == "2026-11-21-study.md"
    text = page.read_text()
    for part in ("shardmark run ovi-2025\n", "Claims of ovi-2025", "fsdp / ddp on 2 ranks",
                 "optimizer_state MB", "Integration effort", "Not verified"):  # fmt: skip
        assert part in text


def test_a_run_is_stored_and_loads_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = [invented_trial(name, size) for name, size in (("single", 1), ("ddp", 2), ("ddp", 4))]
    run = write_run(tmp_path / "run", trials, environment=ENVIRONMENT)
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["", str(run), "quick", "--out", str(out), "--archive"])
    main()
    stem = "2026-11-21-quick"
    assert {path.name for path in out.iterdir()} == {
        f"{stem}.json",
        f"{stem}.md",
        f"{stem}.tar.xz",
    }
    assert len(json.loads((out / f"{stem}.json").read_text())["rows"]) == 3
    with tarfile.open(out / f"{stem}.tar.xz") as archive:
        archive.extractall(tmp_path / "back", filter="data")
    back = load_run(tmp_path / "back" / "run")
    assert [trial.id for trial in back.trials] == [trial.id for trial in load_run(run).trials]
    assert json.loads((back.path / "environment.json").read_text())["host"] == "machine"
