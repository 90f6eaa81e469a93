"""Baselines and candidates that were not calm are named beside the verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmark.analysis.compare.comparison import Comparison, compare
from shardmark.analysis.diagnose.stability import Instability
from shardmark.report.page import page
from shardmark.report.page.stability import by_kind, doubt
from shardmark.results.schema import Outcome
from shardmark.results.schema import StabilityKind as Kind
from shardmark.results.store import StoredRun, load_run
from tests.golden.invented import invented_trial, write_run


def comparison() -> Comparison:
    trials = [
        invented_trial(strategy, size, repeat)
        for strategy, size in (("single", 1), ("ddp", 2), ("fsdp", 2))
        for repeat in (0, 1)
    ]
    trials.append(invented_trial("zero-1", outcome=Outcome.FAILED))
    return compare([StoredRun(path=Path("run"), trials=tuple(trials))])


def sign(kind: Kind, place: str, text: str = "odd") -> Instability:
    return Instability(kind=kind, place=place, text=text, severity=1.0)


@pytest.mark.parametrize(
    ("warnings", "expected"),
    [
        ([], ""),
        (
            [sign(Kind.SLOW_STEPS, "ddp-2-0"), sign(Kind.OTHER_PROCESSES, "run")],
            "",
        ),
        (
            [
                sign(Kind.OUTLYING_REPEAT, "ddp-2-1"),
                sign(Kind.TRIAL_DRIFT, "ddp-2-0"),
            ],
            "Not calm: 1 of the 3 rows that decide has a trial that drifted or lies apart"
            " (ddp on 2 ranks).",
        ),
        (
            [sign(Kind.TRIAL_DRIFT, "single-1-0"), sign(Kind.RUN_DRIFT, "run")],
            "Not calm: the machine drifted over the repeats, and 1 of the 3 rows that decide has"
            " a trial that drifted or lies apart (single on 1 rank).",
        ),
        ([sign(Kind.TRIAL_DRIFT, "zero-1-2-0")], ""),
    ],
)
def test_names_what_decides(warnings: list[Instability], expected: str) -> None:
    assert doubt(comparison().rows, warnings) == expected


@pytest.mark.parametrize(
    ("line", "head"),
    [
        ("Fastest (a): ddp, 3 samples/s", "Fastest (a):"),
        ("Soonest to 9 % (a), which all reach (chance: 1 of 9): ddp", "Soonest to 9 % (a)"),
        ("Nothing (of note: a) is here, or there", ""),
        (f"{'x' * 90}: y", ""),
    ],
)
def test_a_line_begins_with_what_it_is_about(line: str, head: str) -> None:
    assert page.headed(line) == (head, line.removeprefix(head))


def test_lists_everything_by_kind() -> None:
    slow, other = sign(Kind.SLOW_STEPS, "a", "x"), sign(Kind.SLOW_STEPS, "b", "y")
    busy = sign(Kind.OTHER_PROCESSES, "c", "z")
    found = by_kind([slow, other, busy])
    assert [(one.kind, one.lines) for one in found] == [
        ("slow steps", ("a: x", "b: y")),
        ("other processes", ("c: z",)),
    ]
    assert found[0].remedy == sign(Kind.SLOW_STEPS, "").remedy


def test_the_page_says_it_once_and_holds_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = [invented_trial(name, 1, repeat) for name in ("single", "ddp") for repeat in (0, 1)]
    run = load_run(write_run(tmp_path / "run", trials))
    signs = tuple(sign(Kind.OUTLYING_REPEAT, f"ddp-1-{number}", "apart") for number in (0, 1))
    monkeypatch.setattr(page, "warnings_of", lambda _: signs)
    text = page.render_page([run], compare([run]), [], None)
    assert text.count("Not calm: 1 of the 2 rows") == 1
    assert "All 2 signs of a machine that was not calm" in text
    assert "<li>ddp-1-0: apart</li>" in text
    assert "<li>ddp-1-1: apart</li>" in text
    assert "UNSTABLE: ddp-1-0: apart (1 more)" in text
    monkeypatch.setattr(page, "warnings_of", lambda _: ())
    calm = page.render_page([run], compare([run]), [], None)
    assert "Not calm" not in calm
    assert "signs of" not in calm
