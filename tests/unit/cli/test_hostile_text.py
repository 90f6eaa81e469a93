"""Text of strangers stays text in whatever the command line prints and writes."""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from shardmark.base.errors import DataError, InputError, ShardmarkError, StrategyUnavailable
from shardmark.base.results.store import load_run
from shardmark.base.table.formats import csv_cell, escape_markdown
from shardmark.base.text import one_line, printable, say
from shardmark.bench.analysis.compare.comparison import compare
from shardmark.bench.progress import display
from shardmark.bench.progress.lines import Lines
from shardmark.bench.report.page.page import render_page
from shardmark.bench.run import load
from shardmark.cli import main
from shardmark.ranks.measure.system import machine_checks
from tests.golden.hostile import GOLDEN, hostile_copy
from tests.golden.invented import invented_trial, write_run
from tests.unit.bench.report.page.test_page import Parsed

STEERS = (
    "=1+2\x1b[2J\x1b]0;title\x07\x9b31m\u202e\u2066\u200f\u2028\x85\r\v\f\x1c\b\x7f"
    "\\input{x}$a^^5c%&#_~"
    "\nFORGED  2  999.9"
)
"""Clears a screen, renames it, turns directions, goes back, ends lines; a formula and TeX."""
RUNS = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)><a href='javascript:x'>`${{7*7}}"
VIEWS: tuple[tuple[str, ...], ...] = (
    ("--wide",), ("--columns", "verdict,threads"), ("--view", "scaling"), ("--view", "epochs"),
    ("--view", "time-to:accuracy_top1"), ("--view", "network"), ("--view", "study:lamsal-2025"),
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / f"run {STEERS[:9]}"
    assert hostile_copy(folder, STEERS) > 100
    return folder


Printed = Callable[..., str]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    def ask(*arguments: str | Path, code: int = 0) -> str:
        assert main(list(map(str, arguments))) == code
        captured = capsys.readouterr()
        return check_text(captured.out + captured.err)

    return ask


def check_text(text: str) -> str:
    for line in text.split("\n"):
        assert all(unicodedata.category(sign)[0] != "C" for sign in line), ascii(line)
        assert not line.startswith("FORGED")
    return text


@pytest.mark.parametrize("view", [(), *VIEWS], ids="-".join)
def test_every_view_escapes_text(run: Path, printed: Printed, view: Sequence[str]) -> None:
    assert "FORGED" in printed("compare", run, *view)


@pytest.mark.parametrize("view", [(), ("--view", "network")])
@pytest.mark.parametrize("form", ["markdown", "latex", "csv", "json"])
def test_other_formats_escape_text(
    run: Path, printed: Printed, view: Sequence[str], form: str
) -> None:
    text = printed("compare", run, *view, "--format", form)
    if form == "latex":
        lines = [line for line in text.split("\n") if line and not line.startswith("%")]
        assert not [line for line in lines if "\\input" in line]
    elif form == "json":
        json.loads(text)
    elif form == "csv":
        rows = list(csv.reader(io.StringIO(text)))
        assert len({len(row) for row in rows}) == 1
        assert not [cell for row in rows for cell in row if cell.startswith("=")]
    else:
        lines = [line.replace("\\|", "") for line in text.split("\n") if line.startswith("|")]
        assert lines
        assert "|" not in "".join(line.strip("|").replace(" | ", "") for line in lines)


def test_regressions_and_exports_escape_text(run: Path, printed: Printed, tmp_path: Path) -> None:
    both = [
        write_run(tmp_path / name, [invented_trial(STEERS, 2, repeat) for repeat in range(3)])
        for name in ("before", "after")
    ]
    for form in ("text", "markdown", "csv"):
        assert "FORGED" in printed("compare", *both, "--regression", "--format", form, code=2)
    printed("export", run, "--to", "csv", "--out", tmp_path / "tables")
    for file in (tmp_path / "tables").iterdir():
        rows = list(csv.reader(io.StringIO(check_text(file.read_text()))))
        assert not [cell for row in rows for cell in row if cell.startswith("=")]
    (trial,) = [place for place in (run / "trials").iterdir() if place.name.startswith("ddp")]
    printed("export", run, "--to", "torchrun", "--trial", trial.name, code=2)
    printed("export", run, "--to", "torchrun", "--trial", STEERS, code=2)


@pytest.mark.parametrize("text", [STEERS, RUNS], ids=["steers", "runs"])
def test_page_escapes_every_text(tmp_path: Path, text: str) -> None:
    """No script, address or handler of theirs, with and without a policy against them."""
    hostile_copy(tmp_path / "run", text)
    stored = load_run(tmp_path / "run")
    content = render_page([stored], compare([stored]), (), None)
    assert all(sign == "\n" or unicodedata.category(sign)[0] != "C" for sign in content)
    page = Parsed(content)
    assert [kind for kind, _ in page.scripts].count(None) == 1
    assert {kind for kind, _ in page.scripts} == {None, "application/json"}
    assert {tag for tag, _ in page.attributes}.isdisjoint({"img", "iframe", "object"})
    assert not [key for _, values in page.attributes for key in values if key.startswith("on")]
    assert not [address for address in page.addresses if address.startswith("javascript")]
    assert one_line(text)[:8] in page.text


def test_notebook_output_escapes_text(run: Path) -> None:
    loaded = load(run)
    for shown in (str(loaded), repr(loaded), loaded._repr_html_()):
        check_text(shown)


EXPERIMENT = """
name: hostile
workload: {name: classification, model: resnet18, dataset: random, data_dir: %s}
recipe: {global_batch: 8, steps: 20}
matrix:
  strategy: [ddp, {name: fsdp, %s: 1}]
  world_size: [2]
  workload.data_dir: [%s, b]
device: cpu
"""


def test_experiments_plans_and_messages_escape_text(tmp_path: Path, printed: Printed) -> None:
    text = json.dumps(STEERS)
    file = tmp_path / f"a{STEERS[:9]}.yaml"
    file.write_text(EXPERIMENT % (text, text, text))
    assert "no such key" in printed("run", file, "--dry-run", code=2)
    file.write_text(EXPERIMENT.replace("{name: fsdp, %s: 1}", "fsdp") % (text, text))
    assert "FORGED" in printed("run", file, "--dry-run", "--out", tmp_path / STEERS)
    file.write_text(f"{text}: 1\n{text}: 2")
    printed("run", file, "--dry-run", code=2)
    for command in ("compare", "report", "run"):
        assert "FORGED" in printed(command, f"nowhere\udcff{STEERS}", code=2)
    assert "FORGED" in printed("run", "quickstart", "--set", f"{STEERS}=1", "--dry-run", code=2)


def test_names_of_the_machine_are_escaped(
    printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody on it names processes, and whoever sells it names devices."""
    state = machine_checks.State.MISSING
    check = machine_checks.Check(name=STEERS, state=state, found=STEERS, remedy=STEERS)
    monkeypatch.setattr(machine_checks, "host_checks", lambda _: [check])
    monkeypatch.setattr(machine_checks, "software_checks", list)
    for form in ("text", "json"):
        assert "FORGED" in printed("doctor", "--format", form)


def test_progress_escapes_text(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(Path(STEERS))
    lines.planned(1, 0, ())
    lines.note(STEERS)
    lines.doing(STEERS)
    console = Console(force_terminal=True, color_system=None, width=80)
    drawn = display.Display(console, console.print, Path(STEERS))
    drawn.note(STEERS)
    drawn.doing(STEERS)
    assert "FORGED" in check_text(capsys.readouterr().out)


@pytest.mark.parametrize(
    "error",
    [
        ShardmarkError(STEERS),
        InputError(STEERS, STEERS, STEERS, InputError(STEERS, STEERS, STEERS)),
        DataError(STEERS, STEERS, STEERS),
        StrategyUnavailable(STEERS, STEERS, STEERS),
    ],
)
def test_errors_escape_control_characters(error: ShardmarkError) -> None:
    lines = check_text(str(error)).split("\n")
    assert len(lines) == 1 + len(error.args[3:])


def test_one_line_escapes_line_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    say("Zürich \U0001f600", STEERS, error=True)
    assert capsys.readouterr().err.split("\n")[::2] == ["Zürich \U0001f600", ""]
    assert one_line("a\tb\r\nc\x1b[31mred\x1b[0m \u200bd") == "a b  cred d"
    assert printable("a\x00\nb\u2028c") == "a\nb c"


@pytest.mark.parametrize("text", ["=1", "\t=1", "\r\n+1", " -1", "@a", "\uff1d1", "\u200b=1"])
def test_csv_cells_are_no_formulas(text: str) -> None:
    assert csv_cell(text).startswith("'")


@pytest.mark.parametrize("text", ["\\| forged", "![](http://a)", "[a](b)", "<img>", "*a*"])
def test_markdown_is_escaped(text: str) -> None:
    escaped = escape_markdown(text)
    assert not re.search(r"(?<!\\)(?:\\\\)*[|<*\[\]]", escaped)


PATHS = ("a\0b", "x" * 5000, "a/" * 3000, "~nobody-of-this-name/x")


@pytest.mark.parametrize(
    "command",
    [
        "compare {}", "report {}", "report GOLDEN --no-images --out {}",
        "export GOLDEN --to csv --out {}",
        "export GOLDEN --to torchrun --trial {}",
        "run {} --dry-run", "run quickstart --dry-run --engine {}",
        "run cifar10-strategies --dry-run --set workload.data_dir={}",
    ],
)  # fmt: skip
def test_invalid_paths_are_refused(printed: Printed, command: str) -> None:
    for path in PATHS:
        printed(*(word.format(path).replace("GOLDEN", str(GOLDEN)) for word in command.split()),
                code=2)  # fmt: skip
