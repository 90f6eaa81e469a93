"""The command line: exit codes, messages without a traceback, and nothing heavy imported."""

from __future__ import annotations

import csv
import io
import json
import tomllib
from pathlib import Path

import pytest
import typer
from tests.golden.invented import invented_trial, write_run

import shardmark
from shardmark import cli
from shardmark.cli.list import listing
from shardmark.core.metrics import METRICS

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "v1"
KINDS = ("strategies", "workloads", "models", "datasets", "metrics", "experiments", "studies")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answer(capsys, "--help")
    assert code == 0
    for verb in ("run", "compare", "list", "doctor", "schema"):
        assert f"\n  {verb} " in out


def test_version_is_the_projects(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = project.get("version", shardmark.__version__)
    assert answer(capsys, "--version") == (0, f"shardmark {version}\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Commands:"),
        (["nonsense"], "No such command 'nonsense'"),
        (["list", "--all"], "No such option: --all"),
        (["list", "metric"], "did you mean 'metrics'?"),
        (["compare"], "runs/latest leads to no run"),
        (["compare", "--format", "pdf", "x"], "'pdf' is not one of 'text', 'markdown'"),
        (["compare", "no/such/run"], "error: no/such/run: does not exist"),
        (["compare", str(GOLDEN.parent)], f"for example {GOLDEN}"),
        (["compare", str(GOLDEN), "--baseline", "dddp"], "did you mean 'ddp'?"),
    ],
)
def test_mistakes_are_messages_and_exit_two(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = answer(capsys, *arguments)
    assert code == 2
    assert message in out + err
    assert not (out and arguments)
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("end", "code"),
    [(typer.Exit(0), 0), (typer.Exit(1), 1), (typer.Exit(130), 130), (KeyboardInterrupt(), 130)],
)
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, end: BaseException, code: int) -> None:
    def ends() -> None:
        raise end

    app = typer.Typer()
    app.command()(ends)
    monkeypatch.setattr(cli, "app", app)
    assert cli.main([]) == code


def test_compare_prints_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    texts = {}
    for form in ("text", "markdown", "json", "csv"):
        code, texts[form], err = answer(capsys, "compare", str(GOLDEN), "--format", form)
        assert (code, err) == (0, "")
    assert "a smaller batch" in texts["text"], "why fsdp has no numbers"
    assert "| strategy |" in texts["markdown"].replace("  ", " ")
    names = {"single", "ddp", "fsdp"}
    assert {row["strategy"] for row in json.loads(texts["json"])["rows"]} == names
    assert {line["strategy"] for line in csv.DictReader(io.StringIO(texts["csv"]))} == names


def test_compare_takes_a_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("compare", str(GOLDEN), "--baseline", "ddp", "--format", "json")
    single, ddp, _ = json.loads(answer(capsys, *arguments)[1])["rows"]
    assert single["metrics"]["speedup"]["value"] == pytest.approx(0.55)
    assert ddp["verdict"] == "baseline"


def test_compare_takes_several_runs_and_each_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = write_run(tmp_path / "other", [invented_trial("single", 1)])
    code, text, _ = answer(capsys, "compare", str(GOLDEN), f"{GOLDEN}/../v1", str(other))
    assert code == 0
    assert f"invented ({other})" in text
    _, rows, _ = answer(capsys, "compare", str(GOLDEN), f"{GOLDEN}/../v1", "--format", "json")
    assert len(json.loads(rows)["rows"]) == 3


@pytest.mark.parametrize("form", ["text", "json"])
def test_compare_tells_damage(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, form: str
) -> None:
    run = write_run(tmp_path / "run", [invented_trial(repeat=0), invented_trial(repeat=1)])
    (run / "trials" / "ddp-2-1" / "result.json").write_text('{"half')
    code, out, err = answer(capsys, "compare", str(run), "--format", form)
    assert code == 0
    told = out if form == "text" else err
    assert "ddp-2-1/result.json: is not whole JSON" in " ".join(told.split())


@pytest.mark.parametrize("kind", KINDS)
def test_list_has_one_line_each(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    code, out, err = answer(capsys, "list", kind)
    assert (code, err) == (0, "")
    lines = listing(kind)
    assert lines
    assert len(out.splitlines()) == len(lines)
    for (name, line), printed in zip(lines.items(), out.splitlines(), strict=True):
        assert printed.startswith(name)
        assert line
        assert "\n" not in line


def test_list_tells_units_and_fixed_options() -> None:
    assert set(listing("metrics")) == set(METRICS)
    assert listing("metrics")["step_seconds"].startswith("[seconds] One optimizer step")
    assert listing("strategies")["zero-2"].endswith("[stage=2]")


def test_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answer(capsys, "schema")
    assert code == 0
    assert json.loads(out)["type"] == "object"
