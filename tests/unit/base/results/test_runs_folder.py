"""The folder of new runs, and the latest run."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmark import cli
from shardmark.base.errors import InputError
from shardmark.base.results.runs_folder import create_run_folder, latest_run
from shardmark.base.results.store import RunFolder


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def begin_run(path: Path) -> None:
    RunFolder.create(path).write_experiment({"name": "mine"})


def test_runs_are_numbered_and_the_newest_is_the_latest(tmp_path: Path) -> None:
    for name in ("mine", "mine-2", "mine-3"):
        folder = create_run_folder("mine")
        assert folder == Path("runs") / name
        begin_run(folder)
        assert latest_run() == folder
    begin_run(tmp_path / "elsewhere")
    assert latest_run() == Path("runs/mine-3")
    begin_run(tmp_path / "runs" / "mine")
    assert latest_run() == Path("runs/mine"), "taken up again"
    assert {path.name for path in Path("runs").iterdir()} == {"mine", "mine-2", "mine-3", "latest"}


def test_an_experiment_may_be_called_latest() -> None:
    folder = create_run_folder("latest")
    begin_run(folder)
    assert (folder, latest_run()) == (Path("runs/latest-2"), folder)


@pytest.mark.parametrize("left", ["nothing", "a folder", "a broken link"])
def test_missing_run_is_reported(left: str, capsys: pytest.CaptureFixture[str]) -> None:
    if left == "a folder":
        Path("runs/latest").mkdir(parents=True)
        begin_run(Path("runs/mine"))
    if left == "a broken link":
        Path("runs").mkdir()
        Path("runs/latest").symlink_to("gone")
    with pytest.raises(InputError, match="shardmark run quickstart"):
        latest_run()
    for command in (["compare"], ["report"], ["export", "--to", "csv"]):
        assert cli.main(command) == 2
        assert "runs/latest leads to no run" in capsys.readouterr().err
