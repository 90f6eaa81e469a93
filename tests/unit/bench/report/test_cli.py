"""`shardmark compare`: every view in every format, and options that do not go together."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable

import pytest

from shardmark import cli
from shardmark.base.results.schema import Failure, Outcome, TrialResult
from shardmark.base.table.formats import Format
from shardmark.base.text import terminal_width
from shardmark.bench.report.answers.answers import answer_lines
from shardmark.bench.report.answers.overview import overview
from tests.golden.invented import compare_trials, invented_trial, trained_trial, write_run

VIEWS = {
    "scaling": ("scaling", "Strong scaling", 3),
    "time_to": ("time-to:accuracy_top1=0.6", "Training time to", 3),
    "epochs": ("epochs", "Epoch by epoch", 8),
}
"""Key in JSON -> value of `--view`, title and number of rows."""


def trials() -> list[TrialResult]:
    return [
        *(trained_trial("single", 1, repeat) for repeat in (0, 1)),
        *(trained_trial("ddp", 2, repeat) for repeat in (0, 1)),
        trained_trial("ddp", 4, 0, accuracies=(0.5, 0.75, 0.8, 0.9)),
        invented_trial("fsdp", 2, outcome=Outcome.FAILED, failure=Failure(reason="100 % <b>|x")),
    ]


Answer = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_run(tmp_path_factory.mktemp("compare") / "run", trials()))


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str], folder: str) -> Answer:
    """Returns what `compare` ends with, prints and reports."""
    return lambda *options: (cli.main(["compare", folder, *options]), *capsys.readouterr())


@pytest.mark.parametrize("key", VIEWS)
def test_a_view_works_in_every_format(answer: Answer, key: str) -> None:
    view, title, number = VIEWS[key]
    outputs = {}
    for form in Format:
        code, outputs[form], err = answer("--view", view, "--format", form)
        assert (code, err) == (0, "")
        if not form.for_programs:
            assert title in outputs[form]
            assert "fsdp on 2 ranks (1 x failed)" in outputs[form]
    rows = [line for line in outputs[Format.LATEX].splitlines() if line.endswith(r" \\")]
    assert len(rows) >= number + 1
    document = json.loads(outputs[Format.JSON])
    assert [row["strategy"] for row in document["rows"]] == ["single", "ddp", "ddp", "fsdp"]
    assert len(document[key]) == number
    assert document["answers"]
    assert len(list(csv.DictReader(io.StringIO(outputs[Format.CSV])))) == number


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "csv", "--view", "epochs", "--view", "scaling"], "2 views are given"),
        (["--view", "speed"], "no view 'speed'; allowed are scaling, epochs, network, time-to:ME"),
        (["--view", "scaling:2"], "this view has no value; write scaling"),
        (["--view", "study"], "it has no value; write study:NAME"),
        (["--view", "study:lamsal"], "no study 'lamsal'; allowed are"),
        (["--view", "scaling", "--wide"], "--wide: it is for the comparison table, in place of wh"),
        (["--view", "epochs", "--columns", "threads"], "leave out --columns or --view epochs"),
        (["--view", "network", "--baseline", "ddp"], "--baseline: it is for the comparison table"),
        (["--view", "study:lamsal-2025", "--format", "csv", "--wide"], "leave out --wide or --vi"),
        (["--regression", "--baseline", "ddp"], "leave out --baseline or --regression"),
        (["--wide", "--columns", "threads"], "--columns: given with --wide; give one of"),
        (["--columns", " ,"], "--columns: names no column"),
        (["--columns", "speedupp"], "did you mean 'speedup'?"),
        (["--view", "time-to:speed=1"], "'speed' is no loss or quality; allowed are train_loss"),
    ],
)
def test_invalid_options_are_a_message(answer: Answer, options: list[str], message: str) -> None:
    code, out, err = answer(*options)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_views_may_be_repeated(answer: Answer) -> None:
    views = ("time-to:accuracy_top1=0.6", "time-to:train_loss", "epochs")
    options = [word for view in views for word in ("--view", view)]
    assert answer(*options)[1].count("Training time to ") == 2
    document = json.loads(answer(*options, "--format", "json")[1])
    assert {row["metric"] for row in document["time_to"]} == {"accuracy_top1", "train_loss"}
    assert document["epochs"]


def test_the_answers_come_first(answer: Answer) -> None:
    first = answer_lines(compare_trials(*trials()))[0][:20]
    text = answer()[1]
    assert text.startswith(first)
    (line,) = [line for line in text.splitlines() if "single " in line and " 402 " in line]
    assert len(line) <= 80
    assert answer("--format", "markdown")[1].startswith(f"- {first}")
    assert r"\begin{tabular}" in answer("--format", "latex")[1]
    document = json.loads(answer("--format", "json")[1])
    assert set(document) == {"answers", "rows", "warnings"}
    questions = [each["question"] for each in document["answers"]]
    assert questions[:3] == ["fastest", "memory", "equivalent"]
    assert answer("--format", "csv")[1].startswith("experiment,")


def test_option_chooses_columns(answer: Answer) -> None:
    assert "verdict" not in answer()[1].partition("--------")[0]
    assert "verdict" in answer("--wide")[1].partition("--------")[0]
    chosen = answer("--columns", "threads, verdict")[1]
    assert "strategy  ranks  threads  verdict" in chosen
    study = answer("--view", "study:lamsal-2025", "--columns", "threads")[1]
    assert "strategy  ranks  threads" in study, "above the study stands the comparison"
    scaling = ("--view", "scaling", "--baseline", "ddp")
    assert "baseline" in answer(*scaling, "--format", "csv")[1]
    assert answer(*scaling, "--format", "json")[0] == 0


@pytest.mark.parametrize("form", Format)
def test_a_run_without_a_row_works_in_every_format(form: Format) -> None:
    assert overview(compare_trials(), form)


def test_a_terminal_s_width_divides_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert terminal_width() is None
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    assert terminal_width() == 50
    text = overview(compare_trials(*trials()), width=terminal_width())
    assert max(map(len, text.splitlines())) <= 50
    table, _, parts = text.partition("Where a step's time goes")
    assert table.count("strategy  ranks") == 2
    assert parts.count("strategy  ranks") >= 2
