"""Links in a run's folder lead nowhere: nothing is read or written through one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shardmark.base.errors import InputError
from shardmark.base.results.files import read_regular, write_atomically
from shardmark.base.results.network import NETWORK_FILE
from shardmark.base.results.schema import FileRecord
from shardmark.base.results.store import RunFolder, load_run
from shardmark.cli import main

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
