"""What a person sees while a run works."""

from __future__ import annotations

from typing import Any, cast

import pytest

from shardmark.cli import progress
from shardmark.cli.progress import Lines, listener
from shardmark.experiment.matrix import LeftOut, expand
from shardmark.experiment.schema import StrategySpec
from shardmark.results.schema import Failure, Outcome
from tests.golden.invented import invented_trial
from tests.unit.launch.fakes import experiment

TRIAL = expand(experiment("matrix.strategy=[ddp]"), "cpu").trials[0]


class Time:
    """Stands for the module: `monotonic` is what the test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    fake = Time()
    monkeypatch.setattr(progress, "time", fake)
    return fake


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_plan_tells_what_is_left_out_and_done(
    capsys: pytest.CaptureFixture[str], time: Time
) -> None:
    left_out = LeftOut(
        strategy=StrategySpec(name="single"), world_size=2, reason="single is one device"
    )
    Lines().planned(3, 0, (left_out,))
    assert printed(capsys) == [
        "left out: single on 2 ranks: single is one device",
        "3 trials; loading libraries",
    ]
    Lines().planned(3, 2, ())
    assert printed(capsys) == ["3 trials, 2 have their result already; loading libraries"]
    Lines().note("something is damaged")
    assert printed(capsys) == ["something is damaged"]
    assert time.now == 100.0


def test_a_line_every_half_minute_and_one_at_the_end(
    capsys: pytest.CaptureFixture[str], time: Time
) -> None:
    lines = Lines()
    lines.planned(2, 0, ())
    lines.trial_started(1, 2, TRIAL)
    printed(capsys)
    for second in range(1, 71):
        time.now = 100.0 + second
        lines.trial_stepped(second, 200)
    title = f"[1/2] {TRIAL.id}"
    assert printed(capsys) == [
        f"{title}: step 30 of 200, 30 s",
        f"{title}: step 60 of 200, 60 s",
    ]
    time.now = 220.0
    lines.trial_ended(1, 2, invented_trial(metrics={"samples_per_second": 412.04}))
    assert printed(capsys) == [f"{title}: ok in 21.5 s, 412.0 samples/s  (about 2.0 min left)"]
    lines.trial_started(2, 2, TRIAL)
    lines.trial_ended(2, 2, invented_trial(metrics={"samples_per_second": None}))
    assert printed(capsys) == [f"[2/2] {TRIAL.id}: ok in 21.5 s"]


@pytest.mark.parametrize(
    ("failure", "end"),
    [
        (Failure(reason="rank 1: no memory", remedy="less"), ": rank 1: no memory; less"),
        (Failure(reason="rank 1 died"), ": rank 1 died"),
        (None, ""),
    ],
)
def test_other_ends_have_their_reason(
    capsys: pytest.CaptureFixture[str], time: Time, failure: Failure | None, end: str
) -> None:
    lines = Lines()
    lines.trial_started(1, 1, TRIAL)
    lines.trial_ended(1, 1, invented_trial(outcome=Outcome.OUT_OF_MEMORY, failure=failure))
    assert printed(capsys) == [f"[1/1] {TRIAL.id}: out_of_memory after 21.5 s{end}"]
    assert time.now == 100.0


class Status:
    def __init__(self) -> None:
        self.shown: list[str] = []

    def update(self, text: object) -> None:
        self.shown.append(str(text))


def test_on_a_terminal_one_line_is_kept_up_to_date(
    capsys: pytest.CaptureFixture[str], time: Time
) -> None:
    status = Status()
    lines = Lines(cast("Any", status))
    lines.trial_started(1, 1, TRIAL)
    time.now += 2
    lines.trial_stepped(1, 9)
    lines.trial_stepped(2, 9)
    title = f"[1/1] {TRIAL.id}"
    assert status.shown == [
        f"{title}: starting",
        f"{title}: step 1 of 9, 2 s",
        f"{title}: step 2 of 9, 2 s",
    ]
    assert printed(capsys) == []


def test_listener_elsewhere_than_a_terminal_prints_lines() -> None:
    with listener() as found:
        assert isinstance(found, Lines)
        assert found._status is None
