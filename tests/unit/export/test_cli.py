"""`shardmark export`, and a stored run of every version to every target."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from shardmark.cli import BAD_INPUT, main
from shardmark.cli.export import To
from shardmark.report.export import TARGETS
from tests.unit.export.runs import write_exportable

ROOT = Path(__file__).parents[3]
GOLDEN = sorted((ROOT / "tests" / "golden").glob("v*"))
LIBRARIES = {
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "parquet": "pyarrow",
}
"""Target -> module; `csv` needs none."""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")


def test_every_target_is_a_choice() -> None:
    assert {one.value for one in To} == set(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("version", GOLDEN, ids=lambda path: path.name)
def test_a_stored_run_exports(
    version: Path, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if target in LIBRARIES:
        pytest.importorskip(LIBRARIES[target], reason=f"{LIBRARIES[target]} is not installed")
    out = tmp_path / "out"
    assert main(["export", str(version), "--to", target, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"{target}: 3 trials to {out}\nlook: " in printed
    assert any(path.is_file() for path in out.rglob("*"))
    assert main(["export", str(version), "--to", target, "--out", str(out)]) == 0


@pytest.mark.parametrize("target", LIBRARIES)
def test_a_missing_library_is_told(
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, LIBRARIES[target], None)
    run, out = write_exportable(tmp_path / "run"), tmp_path / "out"
    assert main(["export", str(run), "--to", target, "--out", str(out)]) == BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith(f"error: cannot export to {target}: ")
    assert error.endswith(f" is not installed; pip install 'shardmark[{target}]'\n")
    assert not out.exists()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert target in extras["optional-dependencies"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("csv --tracking-uri http://x", "--tracking-uri: is for mlflow"),
        ("mlflow --tracking-uri http://x --out y", "--tracking-uri: stands beside --out"),
        ("mlflow --out=", "--out: is empty; "),
        ("mlflow --tracking-uri=", "--tracking-uri: is empty; "),
        *(
            (f"{target} --out {uri}", f"--out {uri}: is a URI, no folder; name ")
            for target in TARGETS
            for uri in ("http://localhost:59999", "sqlite:///x.db", "file:x")
        ),
    ],
)
def test_a_place_that_does_not_fit_is_refused(
    arguments: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = write_exportable(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(run), "--to", *arguments.split()]) == BAD_INPUT
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("place", ["afile/x", "/proc/x"])
def test_a_place_that_cannot_be_written_is_a_message(
    target: str,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if target in LIBRARIES:
        pytest.importorskip(LIBRARIES[target], reason=f"{LIBRARIES[target]} is not installed")
    run = write_exportable(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "afile").touch()
    assert main(["export", str(run), "--to", target, "--out", place]) == BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith(f"error: {place}: cannot be written: ")
    assert ("afile is a file" in error) == (place == "afile/x")
    assert (tmp_path / "afile").read_bytes() == b""


def test_so_is_one_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    run = write_exportable(tmp_path / "run")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "/proc/x")
    assert main(["export", str(run), "--to", "mlflow"]) == BAD_INPUT
    assert capsys.readouterr().err.startswith("error: /proc/x: cannot be written: ")


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "none"), "--to", "csv"]) == BAD_INPUT
    assert "does not exist" in capsys.readouterr().err


def test_a_damaged_trial_is_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_exportable(tmp_path / "run")
    (run / "trials" / "fsdp-w2-fp32-r0-4e5f6a7b" / "steps.jsonl").unlink()
    out = tmp_path / "trials.csv"
    assert main(["export", str(run), str(run), "--to", "csv", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "csv: 1 trial to" in printed.out, "a run that is named twice counts once"
    assert "damaged, left out: " in printed.err
    assert "steps.jsonl is missing" in printed.err
    assert len(out.read_text().splitlines()) == 2


def test_usual_places_are_below_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_exportable(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(run), "--to", "csv"]) == 0
    assert "csv: 2 trials to exports/csv\n" in capsys.readouterr().out
    assert (tmp_path / "exports" / "csv" / "steps.csv").is_file()
