"""The command line: exit codes, messages without a traceback, and what every verb prints."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

import shardmark
from shardmark import cli
from shardmark.base.errors import InputError
from shardmark.base.metrics import METRICS
from shardmark.bench import why
from shardmark.bench.analysis.taken_away import PLAIN, explanation_of
from shardmark.cli import why as why_verb
from shardmark.cli.list import KINDS, SCHEMA, listing
from tests import GOLDEN
from tests.golden.invented import invented_trial, write_run
from tests.unit.bench.analysis.test_taken_away import samples

Captured = pytest.CaptureFixture[str]


def answer(capsys: Captured, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_version_and_schema_are_printed(capsys: Captured) -> None:
    code, text, _ = answer(capsys, "--help")
    assert code == 0
    verbs = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    assert [verb for verb in verbs if f"\n  {verb} " not in text] == []
    assert text.index("Your script:") < text.index("\n  why ") < text.index("Many strategies:")
    for verb in verbs:
        usage = answer(capsys, verb, "--help")[1].partition("\n\n")[0]
        assert "...." not in usage.translate(str.maketrans("", "", "{}"))
    assert answer(capsys, "--version") == (0, f"shardmark {shardmark.__version__}\n", "")
    assert json.loads(answer(capsys, "schema")[1])["type"] == "object"
    assert answer(capsys, "list", "schema") == answer(capsys, "schema")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Your script:"),
        (["run", "train.py"], "train.py is a script: shardmark time takes a script"),
        (["verify", "torchrun", "train.py"], "torchrun is a script: shardmark audit takes"),
        (["audit", "--ranks", "2", "quickstart"], "an experiment: shardmark verify takes an exp"),
        (["time", "a.yaml", "b.yaml"], "a.yaml is an experiment: shardmark run takes"),
        (["time", "torchrun", "--nproc-per-node", "2", "t.py"], "put `--` before a command"),
        (["time", "-m", "package.train"], "put `--` before a command"),
        (["nonsense"], "No such command 'nonsense'"),
        (["list", "--all"], "No such option: --all"),
        (["list", "metric"], "(nearest: 'metrics')"),
        (["compare", "--format", "pdf", "x"], "'pdf' is not one of 'text', 'markdown'"),
        (["compare", "no/such/run"], "error: no/such/run: does not exist"),
        (["compare", str(GOLDEN.parent)], f"for example {GOLDEN}"),
        (["compare", str(GOLDEN), "--baseline", "dddp"], "did you mean 'ddp'?"),
    ],
)
def test_mistakes_are_messages_and_exit_two(
    capsys: Captured,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = answer(capsys, *arguments)
    assert code == 2
    assert message in out + err
    assert not (out and arguments)
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("end", "code"),
    [(typer.Exit(0), 0), (typer.Exit(1), 1), (typer.Exit(130), 130), (KeyboardInterrupt(), 130)],
)
def test_exceptions_become_exit_codes(
    monkeypatch: pytest.MonkeyPatch, end: BaseException, code: int
) -> None:
    def ends() -> None:
        raise end

    app = typer.Typer()
    app.command()(ends)
    monkeypatch.setattr(cli, "app", app)
    assert cli.main([]) == code


def test_without_a_run_the_latest_is_taken(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, strategy in (("older", "single"), ("newer", "ddp")):
        write_run(Path("runs") / name, [invented_trial(strategy, 2 if strategy == "ddp" else 1)])
    code, rows, _ = answer(capsys, "compare", "--format", "json")
    assert code == 0
    assert [row["strategy"] for row in json.loads(rows)["rows"]] == ["ddp"]
    assert answer(capsys, "report", "--no-images") == (0, "report: runs/newer/report.html\n", "")
    assert answer(capsys, "export", "--to", "csv")[0] == 0
    trials = csv.DictReader(io.StringIO(Path("exports/csv/trials.csv").read_text()))
    assert [trial["strategy"] for trial in trials] == ["ddp"]


def test_compare_takes_a_baseline_and_several_runs_each_once(
    capsys: Captured, tmp_path: Path
) -> None:
    again = f"{GOLDEN}/../v1"
    arguments = ("compare", str(GOLDEN), again, "--baseline", "ddp", "--format", "json")
    single, ddp, _ = json.loads(answer(capsys, *arguments)[1])["rows"]
    assert single["metrics"]["speedup"]["value"] == pytest.approx(0.55)
    assert ddp["verdict"] == "baseline"
    other = write_run(tmp_path / "other", [invented_trial("single", 1)])
    code, text, _ = answer(capsys, "compare", str(GOLDEN), str(other))
    assert code == 0
    assert f"invented ({other})" in text


@pytest.mark.parametrize(
    ("options", "code"),
    [("--format text", 0), ("--format json", 0), ("--view scaling", 0), ("--regression", 2)],
)
def test_compare_reports_damaged_trials(
    capsys: Captured, tmp_path: Path, options: str, code: int
) -> None:
    run = write_run(tmp_path / "run", [invented_trial(repeat=0), invented_trial(repeat=1)])
    runs = [run, write_run(tmp_path / "b", [invented_trial()])] if code else [run]
    (run / "trials" / "ddp-2-1" / "result.json").write_text('{"half')
    ended, out, err = answer(capsys, "compare", *map(str, runs), *options.split())
    assert ended == code
    printed = out if options == "--format text" else err
    assert "ddp-2-1/result.json: is not whole JSON" in " ".join(printed.split())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != SCHEMA])
def test_list_has_one_line_each(capsys: Captured, kind: str) -> None:
    code, out, err = answer(capsys, "list", kind)
    assert (code, err) == (0, "")
    lines = listing(kind)
    assert lines
    for (name, line), printed in zip(lines.items(), out.splitlines(), strict=True):
        assert printed.startswith(name)
        assert line


def test_list_shows_units_and_fixed_options() -> None:
    assert set(listing("metrics")) == set(METRICS)
    assert listing("metrics")["step_seconds"].startswith("[seconds] One optimizer step")
    assert listing("strategies")["zero-2"].endswith("[stage=2]")


def test_shell_completes_verbs_and_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_SHARDMARK_COMPLETE", "complete_bash")
    for words, completions in (("shardmark pl", "plan"), ("shardmark run --bud", "--budget")):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        assert cli.main([]) == 0
        assert capsys.readouterr().out.split() == [completions]


@pytest.mark.parametrize(
    ("budget", "shares"),
    [((), [600, 600, 600]), (("--budget", "90s"), [30, 40, 0])],
    ids=["10 minutes for each", "shared"],
)
def test_numbers_of_ranks_share_the_budget_of_why(
    budget: tuple[str, ...],
    shares: list[float],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: Captured,
) -> None:
    """Time that a number leaves is for the others; one that takes longer takes it from them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    clock = [0.0]
    took = iter(shares if not budget else [10, 90, 1])
    given = []

    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    monkeypatch.delenv("OMP_NUM_THREADS")

    def explain(*_: Any, budget_seconds: float, **__: Any) -> Any:
        assert os.environ["OMP_NUM_THREADS"] == "1", "the only rank has no more threads than others"
        given.append(budget_seconds)
        if not budget_seconds:
            raise InputError("--budget", "no time for one trial", "give it more")
        clock[0] += next(took)
        return explanation_of(samples({PLAIN: (0.1,), "no_peers": (0.1, 0.1, 0.1)}), ["no_peers"])

    monkeypatch.setattr(why_verb, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(why, "explain", explain)
    words = ("why", "--ranks", "1,2,4", *budget, "--format", "json", "--", "train.py")
    code, printed, errors = answer(capsys, *words)
    assert (code, given) == (0, shares)
    assert ("no answer for 4 ranks: --budget" in errors) == bool(budget)
    assert len(json.loads(printed)) == sum(map(bool, shares)), "what was measured is printed"
