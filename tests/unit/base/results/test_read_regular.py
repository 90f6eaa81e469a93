"""Files of a run that would never end, or fill the memory, are told instead of read."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from shardmark.base.errors import InputError
from shardmark.base.results import files
from shardmark.base.results.files import MAX_BYTES, read_regular
from shardmark.base.results.network import NETWORK_FILE, read_network
from shardmark.base.results.store import RunFolder, load_run
from shardmark.bench.analysis.compare.comparison import compare
from shardmark.bench.analysis.trial import raw_files
from shardmark.bench.analysis.trial.raw_files import number, raw_lines
from shardmark.bench.report.page.page import render_page
from shardmark.bench.report.page.parts import facts_of, log_tail

Make = Callable[[Path], None]
FILES = ("trials/ddp-2-1/result.json", "environment.json", "verification.json", NETWORK_FILE)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def served(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")  # names of sockets are short
    os.close(folder)


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)  # a hole: it takes no room on the disk


@pytest.mark.parametrize("make", [pipe, served, large])
def test_run_with_irregular_or_huge_files_is_read(run: Path, make: Make) -> None:
    for name in FILES:
        path = run / name
        path.unlink(missing_ok=True)
        make(path)
        with pytest.raises(OSError, match=r"is no regular file|is larger than 64 MiB"):
            read_regular(path)
    stored = load_run(run, verify=True)
    assert [trial.id for trial in stored.trials] == ["ddp-2-0"]
    assert "cannot be read: it is" in stored.damaged[0].reason


def test_report_of_a_run_with_unreadable_files_shows_the_rest(run: Path) -> None:
    for name in ("experiment.yaml", "environment.json"):
        (run / name).unlink()
        pipe(run / name)
    stored = load_run(run)
    page = render_page([stored], compare([stored]), (), None)
    assert "experiment.yaml cannot be read: it is" in page


DAMAGED = {"deep": "[" * 100_000, "many": "[" + "[]," * 200_000 + "0]", "number": "9" * 5000}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_small_file_cannot_expand_in_memory(
    run: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_VALUES", 200_000)
    for name in FILES:
        (run / name).write_text(content)
    stored = load_run(run)
    (damaged,) = stored.damaged
    assert "JSON" in damaged.reason or "holds more than 200,000 values" in damaged.reason
    assert stored.verification is None
    assert RunFolder(run).read_environment() == {}
    with pytest.raises(InputError):
        read_network(run)


def test_numbers_of_an_environment_are_shown_whatever_they_are(run: Path) -> None:
    stored = {"host": "h", "total_bytes": 10**400, "cores": -(10**400), "load": math.nan}
    (run / "environment.json").write_text(json.dumps(stored))
    assert "Infinity" in facts_of(load_run(run)).environment


@pytest.mark.parametrize("make", [pipe, large])
def test_irregular_raw_files_are_empty(tmp_path: Path, make: Make) -> None:
    make(tmp_path / "log.txt")
    assert list(raw_lines(tmp_path / "log.txt")) == []
    log_tail(tmp_path)


def test_raw_lines_are_bounded_in_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_files, "_MAX_VALUES", 1000)
    path = tmp_path / "steps.jsonl"
    path.write_text("{}\n" * 500)
    assert len(list(raw_lines(path))) == 1000 // 6
    path.write_text('{"a": [' + "1," * 2000 + "1]}\n")
    assert list(raw_lines(path)) == []
    assert [number(value) for value in (10**400, -1, True, "1", None)] == [None, -1, *[None] * 3]
