"""Lines that a person sees while a run works."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from shardmark.base.files.strict_yaml import parse_yaml
from shardmark.base.results.schema import Failure, Outcome
from shardmark.bench.launch.listener import TrialProgress
from shardmark.bench.launch.run_options import RunOptions
from shardmark.bench.progress import display, lines, pace
from shardmark.bench.progress.display import listener
from shardmark.bench.progress.lines import Lines, Quiet, figures, shown, title
from shardmark.experiment.matrix import LeftOut, expand
from shardmark.ranks.trial import StrategySpec, Trial
from tests.golden.invented import invented_trial
from tests.unit.bench.launch.fakes import experiment
from tests.unit.bench.progress.test_pace import Time

Printed = Callable[[], list[str]]


def trials(*overrides: str) -> tuple[Trial, ...]:
    return expand(experiment("matrix.strategy=[ddp]", *overrides), "cpu").trials


TRIAL = trials()[0]
TITLE = "ddp on 2 ranks"
MEASURED = {"samples_per_second": 412.04, "peak_memory_bytes": 128.6 * 2**20}


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    fake = Time()
    for module in (lines, pace):
        monkeypatch.setattr(module, "time", fake)
    return fake


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    def ask() -> list[str]:
        return capsys.readouterr().out.splitlines()

    return ask


def test_a_display_draws_progress_in_place_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "DRAW_EVERY_SECONDS", 0.0)
    console = Console(force_terminal=True, color_system=None, width=80, record=True)
    drawn = display.Display(console, console.print, None)
    drawn.trial_started(1, 2, TRIAL)
    drawn.trial_stepped(TrialProgress(steps=3, total_steps=9))
    assert "step 3 of 9" in console.export_text()


def test_plan_shows_folder_and_cells_left_out(printed: Printed) -> None:
    single = StrategySpec(name="single")
    left_out = LeftOut(strategy=single, world_size=2, reason="single is one device")
    Lines().planned(3, 0, (left_out,))
    Lines(Path("runs/a\x07b")).planned(3, 2, ())
    assert printed() == [
        "left out: single on 2 ranks: single is one device",
        "3 trials; loading libraries",
        "writing to runs/ab",
        "3 trials, 2 finished already; loading libraries",
    ]


def test_a_line_every_half_minute_and_one_at_the_end(printed: Printed, time: Time) -> None:
    told = Lines()
    told.planned(2, 0, ())
    told.doing("verifying [1/1] ddp")
    told.trial_started(1, 2, TRIAL)
    printed()
    for second in range(1, 71):
        time.now = 100.0 + second
        told.trial_stepped(TrialProgress(steps=2 * second, total_steps=200))
    assert printed() == [
        f"[1/2] {TITLE}: step 60 of 200, 16.0 samples/s, 30 s elapsed, about 3 min left",
        f"[1/2] {TITLE}: step 120 of 200, 16.0 samples/s, 60 s elapsed, about 2 min left",
    ]
    time.now = 220.0
    told.trial_ended(1, 2, invented_trial(metrics=MEASURED))
    ended = f"[1/2] {TITLE}: ok in 21.5 s, 412.0 samples/s, peak 129 MiB, about 2 min left"
    assert printed() == [ended]
    told.trial_started(2, 2, TRIAL)
    told.trial_ended(2, 2, invented_trial(metrics=dict.fromkeys(MEASURED)))
    assert printed() == [f"[2/2] {TITLE}: ok in 21.5 s"]


def test_trials_without_a_number_last_until_the_budget_ends(printed: Printed, time: Time) -> None:
    told = Lines(budget_seconds=300.0)
    told.planned(None, 0, ())
    told.trial_started(1, None, TRIAL)
    time.now += 20.0
    told.trial_ended(1, None, invented_trial())
    first, ended = printed()
    assert first == "as many trials as decide; loading libraries"
    assert ended.startswith(f"[1] {TITLE}: ok in")
    assert ended.endswith(", about 5 min left")
    Lines().planned(None, 0, ())


@pytest.mark.parametrize(
    ("outcome", "failure", "end"),
    [
        ("out_of_memory", Failure(reason="rank 1", remedy="less"), " after 21.5 s: rank 1; less"),
        ("out_of_memory", Failure(reason="a\n\x1b[31m"), " after 21.5 s: a "),
        ("out_of_memory", None, " after 21.5 s"),
        ("interrupted", Failure(reason="by the user", remedy="again"), " after 21.5 s"),
    ],
)
def test_failed_trials_show_reason_and_folder(
    printed: Printed, outcome: str, failure: Failure | None, end: str
) -> None:
    """The lines below give the folder, and the command to use after an interruption."""
    told = Lines()
    told.trial_started(1, 1, TRIAL)
    result = invented_trial(outcome=Outcome(outcome), failure=failure)
    told.trial_ended(1, 1, result)
    assert printed() == [f"[1/1] {TITLE}: {outcome}{end} (trials/{result.id})"]


@pytest.mark.parametrize(
    "value",
    [{"1": 2.0}, {}, [0.1, "adam w", "true", None, True], {"name": "step", "at": [1, 2]}, None],
)
def test_values_are_yaml_on_one_line(value: object) -> None:
    assert parse_yaml(shown(value), "test") == value
    assert shown([value] * 99).isprintable()


def test_title_distinguishes_trials() -> None:
    made = trials("matrix.recipe.precision=[fp32,bf16]", "measure.repeats=2")
    assert {title(trial) for trial in made} == {
        f"{TITLE}, recipe.precision={precision}, repeat {repeat} of 2"
        for precision in ("fp32", "bf16")
        for repeat in (1, 2)
    }
    nodes = trials("matrix.strategy=[ddp]", "matrix.world_size=[2]", "matrix.nodes=[1, 2]")
    assert {title(trial) for trial in nodes} == {"ddp on 2 ranks", "ddp on 2 ranks of 2 nodes"}


def test_figures_show_known_values(time: Time) -> None:
    watch = pace.Pace()
    watch.planned(1)
    watch.trial_started(samples_per_step=8)
    assert figures(TrialProgress(steps=0, total_steps=9), watch) == ("step 0 of 9", "0 s elapsed")
    reading = TrialProgress(steps=3, total_steps=9, loss=1.23456, loss_steps=2)
    assert figures(reading, watch)[1] == "loss 1.235", "as good as now"
    late = TrialProgress(steps=8, total_steps=9, loss=float("nan"), loss_steps=4)
    assert figures(late, watch)[1] == "loss nan at step 4", "that of a GPU's last epoch"
    assert figures(TrialProgress(steps=9, total_steps=9), watch)[1] == "finishing"
    for seconds, steps in ((0, 1), (1, 2)):
        time.now += seconds
        watch.stepped(steps, 9)
    assert figures(TrialProgress(steps=2, total_steps=9), watch)[1] == "8.0 samples/s"
    watch.tokens_per_sample = 256
    assert figures(TrialProgress(steps=2, total_steps=9), watch)[1] == "2048 tokens/s"
    time.now += 60
    assert figures(TrialProgress(steps=2, total_steps=9), watch)[1] == "no step for 60 s"


@pytest.mark.parametrize(("name", "value"), [("FORCE_COLOR", "1"), ("TERM", "dumb")])
def test_listener_prints_lines_where_nothing_can_be_drawn(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """Into a pipe whatever the colours, and on a terminal without a cursor to move."""
    monkeypatch.setenv(name, value)
    if name == "TERM":
        terminal = SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: 1))
        monkeypatch.setattr(display, "sys", terminal)
    with listener() as chosen:
        assert type(chosen) is Lines


def test_a_notebook_draws_the_trial_in_its_cell(
    monkeypatch: pytest.MonkeyPatch, printed: Printed
) -> None:
    """IPython's own display is enough: no widgets."""
    cell: list[Any] = []
    module = ModuleType("IPython.display")
    handle = SimpleNamespace(update=cell.append)
    module.__dict__["display"] = lambda _, display_id: handle if display_id else None
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(display, "Console", partial(Console, force_jupyter=True))
    with listener() as told:
        told.trial_started(1, 1, TRIAL)
        told.trial_stepped(TrialProgress(steps=3, total_steps=9))
        told.note("a note")
    first, *_, last = cell
    assert f"[1/1] {TITLE}" in first._repr_mimebundle_((), ())["text/plain"]
    assert printed() == ["a note"]
    assert str(last) == "", "the bar is gone in the end"


@pytest.mark.parametrize("outcome", Outcome)
def test_quiet_prints_only_failures(capsys: pytest.CaptureFixture[str], outcome: Outcome) -> None:
    with listener(options=RunOptions(quiet=True)) as quiet:
        assert isinstance(quiet, Quiet)
        quiet.planned(1, 0, ())
        quiet.note("something is damaged")
        quiet.trial_started(1, 1, TRIAL)
        quiet.trial_stepped(TrialProgress(steps=1, total_steps=9))
        failure = None if outcome is Outcome.OK else Failure(reason="why\x07")
        quiet.trial_ended(1, 1, invented_trial(outcome=outcome, failure=failure))
    out, err = capsys.readouterr()
    assert out == ""
    told = outcome in (Outcome.FAILED, Outcome.TIMED_OUT)
    assert (f"{TITLE}: {outcome} after" in err) == bool(err) == told
    assert "\x07" not in err
