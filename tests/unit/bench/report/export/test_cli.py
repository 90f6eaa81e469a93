"""`shardmark export`: what it refuses, and says."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shardmark.cli import BAD_INPUT, INTERRUPTED, main
from tests import ROOT
from tests.unit.bench.report.export.runs import OK, write_exportable
from tests.unit.bench.report.export.trackers import (
    LIBRARIES,
    clear_user_settings,
    skip_without_library,
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clear_user_settings(monkeypatch)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("target", LIBRARIES)
def test_a_missing_library_names_its_extra(
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, target, None)
    run = write_exportable(tmp_path / "run")
    assert main(["export", str(run), "--to", target]) == BAD_INPUT
    assert f"not installed; pip install 'shardmark[{target}]'\n" in capsys.readouterr().err
    assert not (tmp_path / "exports").exists()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert target in extras["optional-dependencies"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("pdf", "--to: found 'pdf'; allowed are tensorboard, mlflow, "),
        ("csv --tracking-uri http://x", "--tracking-uri: is for mlflow"),
        ("mlflow --tracking-uri http://x --out y", "--tracking-uri: is given with --out"),
        ("mlflow --out=", "--out: is empty; "),
        ("mlflow --tracking-uri=", "--tracking-uri: is empty; "),
        *(
            (f"{target} --out {uri}", f"--out {uri}: is a URI, no folder; name ")
            for target, uri in (("csv", "http://localhost:59999"), ("mlflow", "sqlite:///x.db"))
        ),
        *(
            (f"{target} --out {place}", rf"{place}\S*: cannot be written: {reason}")
            for target in ("csv", "tensorboard")
            for place, reason in (("afile/x", "afile is a file"), ("/proc/x", ""))
        ),
    ],
)
def test_a_target_or_place_that_does_not_fit_is_refused(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skip_without_library(arguments.split(maxsplit=1)[0])
    run = write_exportable(tmp_path / "run")
    (tmp_path / "afile").touch()
    assert main(["export", str(run), "--to", *arguments.split()]) == BAD_INPUT
    assert re.match(f"error: {message}", capsys.readouterr().err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["afile", "run"]


def test_missing_runs_and_damaged_trials_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path / "none"), "--to", "csv"]) == BAD_INPUT
    assert "does not exist" in capsys.readouterr().err
    run = write_exportable(tmp_path / "run")
    (run / "trials" / "fsdp-w2-fp32-r0-4e5f6a7b" / "steps.jsonl").unlink()
    assert main(["export", str(run), str(run), "--to", "csv", "--out", "trials.csv"]) == 0
    printed = capsys.readouterr()
    assert "csv: 1 trial to" in printed.out, "a run that is named twice counts once"
    assert "damaged, left out: " in printed.err
    assert "steps.jsonl is missing" in printed.err


class FakeTrackio(ModuleType):
    """The part of Trackio that the export uses, with what it was given."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.__spec__ = ModuleSpec("trackio", None)
        self.projects: dict[str, list[Any]] = {}
        self.logged: list[tuple[dict[str, float], int]] = []
        self.dies_after: int | None = None

    def Api(self) -> SimpleNamespace:  # noqa: N802 (Trackio's name)
        return SimpleNamespace(runs=self._runs)

    def _runs(self, project: str) -> list[Any]:
        if project not in self.projects:
            raise ValueError(f"Project '{project}' does not exist")
        return self.projects[project]

    def init(self, project: str, name: str, config: dict[str, Any], **_: bool) -> SimpleNamespace:
        run = SimpleNamespace(name=name, config=config)
        run.rename = lambda new_name: setattr(run, "name", new_name)
        run.delete = lambda: self.projects[project].remove(run)
        self.projects.setdefault(project, []).append(run)
        return SimpleNamespace(log=self.log, finish=lambda: None)

    def log(self, data: dict[str, float], step: int) -> None:
        if len(self.logged) == self.dies_after:
            raise KeyboardInterrupt
        self.logged.append((data, step))


def test_trackio_gets_every_trial_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trackio = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    run, out = write_exportable(tmp_path / "run"), tmp_path / "out"
    out.mkdir()
    trackio.dies_after = 2
    assert main(["export", str(run), "--to", "trackio", "--out", str(out)]) == INTERRUPTED
    assert [entry.name.partition(" ")[2] for entry in trackio.projects["invented"]] == [
        "(unfinished)"
    ]
    trackio.dies_after = None
    trackio.logged.clear()
    for message in ("2 trials to", "0 trials to"):
        assert main(["export", str(run), "--to", "trackio", "--out", str(out)]) == 0
        assert f"trackio: {message} {out}" in capsys.readouterr().out
    runs = trackio.projects["invented"]
    assert [each.config["outcome"] for each in runs] == ["ok", "out_of_memory"]
    assert runs[0].name.startswith(f"{OK}-")
    assert " " not in runs[0].name
    values, step = trackio.logged[4]
    assert step == 4
    assert values["total_seconds"] > 0
    assert "TRACKIO_DIR" not in os.environ
