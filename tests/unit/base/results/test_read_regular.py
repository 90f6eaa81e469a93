"""Files of a run that never end, fill the memory or lead elsewhere are told instead of read."""

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
from shardmark.base.results.files import MAX_BYTES, read_regular, write_atomically
from shardmark.base.results.network import NETWORK_FILE, read_network
from shardmark.base.results.schema import FileRecord
from shardmark.base.results.store import RunFolder, load_run
from shardmark.bench.analysis.compare.comparison import compare
from shardmark.bench.analysis.trial import raw_files
from shardmark.bench.analysis.trial.raw_files import number, raw_lines
from shardmark.bench.report.page.page import render_page
from shardmark.bench.report.page.parts import facts_of, log_tail
from shardmark.cli import main

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


TRIAL = "trials/ddp-2-1"
LINKED = (
    *("environment.json", "verification.json", NETWORK_FILE, f"{TRIAL}/result.json"),
    *("experiment.yaml", "fingerprint.json", ".lock", "trials", TRIAL, "set-aside"),
    *(f"{TRIAL}/{name}" for name in ("steps.jsonl", "samples.jsonl", "log.txt", "beside")),
    *("report.html", "report-figures", "report-figures/throughput.svg"),
)


def files_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def link(run: Path, name: str, private: Path) -> Path:
    """Move the file to a private folder and put a link in its place."""
    place = run / name
    private.mkdir()
    (private / "key").write_text("nobody else's")
    if place.exists():
        place.rename(private / "moved")
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(private / ("moved" if (private / "moved").exists() else "key"))
    return place


@pytest.mark.parametrize("name", LINKED)
def test_a_link_anywhere_in_a_run_is_refused(run: Path, name: str, tmp_path: Path) -> None:
    """It would have a file of the user's published, or his folder emptied, by whoever made it."""
    place = link(run, name, tmp_path / "private")
    before = files_below(tmp_path)
    for use in (load_run, RunFolder.check, RunFolder.create):
        with pytest.raises(InputError, match=f"{place}: is a link"):
            use(run)
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("name", [TRIAL, "report.html"])
def test_every_command_refuses_a_link(
    run: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = link(run, name, tmp_path / "private")
    before = files_below(tmp_path)
    for command in (
        ["run", "quickstart", "--out", str(run)],
        ["run", "quickstart", "--remeasure", "--out", str(run)],
        ["compare", str(run)],
        ["report", str(run)],
        ["export", str(run), "--to", "csv", "--out", str(tmp_path / "tables")],
    ):
        assert main(command) == 2
        told = capsys.readouterr()
        assert f"{place}: is a link" in told.err
        assert told.out == ""
    assert files_below(tmp_path) == before


def test_a_link_to_the_run_itself_is_the_users_own(run: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(run)
    assert len(load_run(tmp_path / "latest").trials) == 2


def test_links_planted_while_a_command_works_lead_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, path = tmp_path / "private", tmp_path / "result.json"
    private.write_text("key")
    path.symlink_to(private)
    with pytest.raises(OSError, match="is a link"):
        read_regular(path)
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    path.with_name(f".{path.name}.{os.getpid()}-guessed.tmp").symlink_to(private)
    write_atomically(path, b"new")
    assert (private.read_text(), path.is_symlink(), path.read_text()) == ("key", False, "new")
    assert len(list(tmp_path.iterdir())) == 2


def test_a_result_names_no_files_of_others(run: Path, tmp_path: Path) -> None:
    """The message would reveal if a file elsewhere has this content."""
    (tmp_path / "private").write_text("key")
    path = run / TRIAL / "result.json"
    stored = json.loads(path.read_text())
    elsewhere = {"../../../private": FileRecord(size_bytes=3, sha256="").model_dump()}
    path.write_text(json.dumps(stored | {"files": elsewhere}))
    (damaged,) = RunFolder(run).read(verify=True).damaged
    assert "no trial has such a file" in damaged.reason
