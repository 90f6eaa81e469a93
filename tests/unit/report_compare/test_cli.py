"""`shardmark compare`: every view in every format, and options that do not go together."""

from __future__ import annotations

import csv
import io
import json

import pytest

from shardmark import cli
from shardmark.cli.compare import render, terminal_width
from shardmark.report.answers.answers import answer_lines
from shardmark.report.table.formats import Format
from shardmark.results.schema import Failure, Outcome, TrialResult
from tests.golden.invented import invented_trial, write_run
from tests.unit.report_compare.runs import compared, learning_trial
from tests.unit.report_compare.tex import check_tex

VIEWS = {
    "epochs": (["--epochs"], "Epoch by epoch", 8),
    "scaling": (["--scaling"], "Strong scaling: the ranks share one global batch", 3),
    "pareto": (
        ["--pareto"],
        "Pareto front of samples/s (higher), peak memory (lower), accuracy_top1 (higher)",
        3,
    ),
    "time_to": (["--time-to", "accuracy_top1=0.6"], "Training time to accuracy_top1 ≥ 0.6", 3),
}
"""Option, title, lines."""


def trials() -> list[TrialResult]:
    return [
        learning_trial("single", 1, 0, accuracies=(0.5, 0.75)),
        learning_trial("single", 1, 1, accuracies=(0.5, 0.75)),
        learning_trial("ddp", 2, 0, accuracies=(0.5, 0.75)),
        learning_trial("ddp", 2, 1, accuracies=(0.5, 0.75)),
        learning_trial("ddp", 4, 0, accuracies=(0.5, 0.75, 0.8, 0.9)),
        invented_trial("fsdp", 2, outcome=Outcome.FAILED, failure=Failure(reason="100 % <b>|x")),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_run(tmp_path_factory.mktemp("compare") / "run", trials()))


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["compare", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("key", VIEWS)
def test_a_view_works_in_every_format(
    capsys: pytest.CaptureFixture[str], folder: str, key: str
) -> None:
    options, title, number = VIEWS[key]
    outputs = {}
    for form in Format:
        code, out, err = answer(capsys, folder, *options, "--format", form)
        assert (code, err) == (0, "")
        outputs[form] = out
    assert outputs[Format.TEXT].startswith(f"{title}\n\nstrategy")
    assert outputs[Format.MARKDOWN].startswith(f"### {title}\n\n| strategy")
    check_tex(outputs[Format.LATEX])
    rows = [line for line in outputs[Format.LATEX].splitlines() if line.endswith(r" \\")]
    assert len(rows) >= number + 1
    document = json.loads(outputs[Format.JSON])
    assert [row["strategy"] for row in document["rows"]] == ["single", "ddp", "ddp", "fsdp"]
    assert document[key]
    assert document["answers"]
    assert len(list(csv.DictReader(io.StringIO(outputs[Format.CSV])))) == number
    for form in (Format.TEXT, Format.MARKDOWN, Format.LATEX):
        assert "fsdp on 2 ranks (1 x failed)" in outputs[form]


def test_views_stand_below_one_another(capsys: pytest.CaptureFixture[str], folder: str) -> None:
    options = [option for one, _, _ in VIEWS.values() for option in one]
    _, out, _ = answer(capsys, folder, *options)
    places = [out.index(VIEWS[key][1]) for key in ("scaling", "pareto", "time_to", "epochs")]
    assert places == sorted(places)
    document = json.loads(answer(capsys, folder, *options, "--format", "json")[1])
    assert set(VIEWS) <= set(document)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--against", "lamsal-2025", "--scaling"],
            "--scaling: given together with --against lamsal-2025; give one of the two",
        ),
        (["--against", "lamsal-2025", "--pareto"], "error: --pareto: given together with"),
        (["--against", "lamsal-2025", "--time-to", "map"], "error: --time-to: given together"),
        (
            ["--format", "csv", "--pareto", "--scaling"],
            "--format csv: --scaling and --pareto are several tables; allowed is one at a time",
        ),
        (["--columns", "speedupp"], "did you mean 'speedup'?"),
        (["--time-to", "speed=1"], "--time-to: 'speed' is no loss or quality; allowed are train"),
        (["--time-to", "accuracy_top1=80"], "'80'; must be a fraction from 0 to 1"),
        (["--time-to"], "requires an argument"),
    ],
)
def test_what_does_not_go_together_is_a_message(
    capsys: pytest.CaptureFixture[str], folder: str, options: list[str], message: str
) -> None:
    code, out, err = answer(capsys, folder, *options)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_against_a_study_goes_with_every_format(
    capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    arguments = (folder, "--against", "lamsal-2025", "--format")
    code, out, _ = answer(capsys, *arguments, "latex")
    assert code == 0
    check_tex(out)
    assert json.loads(answer(capsys, *arguments, "json")[1])["against"]


def test_the_answers_come_first(capsys: pytest.CaptureFixture[str], folder: str) -> None:
    first = answer_lines(compared(*trials()))[0][:40]
    text = answer(capsys, folder)[1]
    assert text.startswith(first)
    table = [line for line in text.splitlines() if "single" in line and "402.0" in line]
    assert len(table) == 1
    assert len(table[0]) <= 80
    assert answer(capsys, folder, "--format", "markdown")[1].startswith(f"- {first[:20]}")
    latex = answer(capsys, folder, "--format", "latex")[1]
    assert r"\caption{invented: classification resnet18 digits}" in latex
    check_tex(latex)
    document = json.loads(answer(capsys, folder, "--format", "json")[1])
    assert set(document) == {"answers", "rows", "warnings"}
    assert [one["question"] for one in document["answers"]][-3:] == [
        *("fastest", "memory", "equivalent")
    ]
    assert answer(capsys, folder, "--format", "csv")[1].startswith("experiment,")


def test_columns(capsys: pytest.CaptureFixture[str], folder: str) -> None:
    assert "verdict" not in answer(capsys, folder)[1].partition("--------")[0]
    assert "verdict" in answer(capsys, folder, "--wide")[1].partition("--------")[0]
    chosen = answer(capsys, folder, "--columns", "threads, verdict")[1]
    assert "strategy  ranks  threads  verdict" in chosen


def test_a_run_without_a_row_works_in_every_format() -> None:
    for form in Format:
        assert render(compared(), form)


def test_a_terminal_s_width_divides_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert terminal_width() is None
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    assert terminal_width() == 50
    text = render(compared(*trials()))
    assert max(map(len, text.splitlines())) <= 50
    assert text.count("strategy  ranks") == 2
