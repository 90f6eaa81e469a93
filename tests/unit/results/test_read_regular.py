"""Files of a run that would never end, or fill the memory, are told instead of read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.golden.invented import invented_trial, write_run

from shardmark.cli import main
from shardmark.results.files import MOST_BYTES, read_regular
from shardmark.results.network import NETWORK_FILE
from shardmark.results.store import load_run

Make = Callable[[Path], None]
FILES = ("trials/ddp-2-1/result.json", "environment.json", "verification.json", NETWORK_FILE)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", [invented_trial(repeat=0), invented_trial(repeat=1)])


def pipe(path: Path) -> None:
    os.mkfifo(path)


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)  # a hole: it takes no room on the disk


@pytest.mark.parametrize("make", [pipe, large])
def test_a_run_with_such_files_is_read(run: Path, make: Make) -> None:
    for name in FILES:
        path = run / name
        path.unlink(missing_ok=True)
        make(path)
        with pytest.raises(OSError, match=r"is no regular file|is larger than 64 MiB"):
            read_regular(path)
    stored = load_run(run, verify=True)
    assert [trial.id for trial in stored.trials] == ["ddp-2-0"]
    assert "cannot be read: it is" in stored.damaged[0].reason


@pytest.mark.parametrize("make", [pipe, large])
def test_a_report_shows_the_rest(run: Path, make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("experiment.yaml", "environment.json"):
        (run / name).unlink()
        make(run / name)
    assert main(["report", str(run), "--no-images"]) == 0
    assert "experiment.yaml cannot be read: it is" in (run / "report.html").read_text()
    assert capsys.readouterr().err == ""


def test_deep_nesting_is_no_environment(run: Path) -> None:
    (run / "environment.json").write_text("[" * 100_000)
    assert main(["report", str(run), "--no-images"]) == 0
    (run / "environment.json").write_text(json.dumps({"host": "h"}))
    assert main(["report", str(run), "--no-images"]) == 0
