"""The parts of the page as data."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmark.analysis.compare.comparison import compare
from shardmark.analysis.compare.rows import Row
from shardmark.report.page.equivalence import verified
from shardmark.report.page.facts import (
    definitions,
    machine_facts,
    method,
    planned_trials,
    progress_notes,
)
from shardmark.report.page.outcomes import LINE_CHARACTERS, TAIL_BYTES, TAIL_LINES, log_tail, not_ok
from shardmark.report.page.trials import ranks_table, trials_table
from shardmark.results.schema import Failure, Outcome, TrialResult
from shardmark.results.store import load_run
from shardmark.results.verification import Cause, Check, Verdict, Verification, write_verification
from tests.golden.invented import invented_rank, invented_trial, write_run

STRATEGY_SPEC = {"name": "ddp", "options": {}}


def rows_of_trials(folder: Path, *trials: TrialResult) -> tuple[Row, ...]:
    return compare([load_run(write_run(folder, trials))]).rows


HUNDRED = [f"line {number}" for number in range(100)]


@pytest.mark.parametrize(
    ("content", "shown", "cut"),
    [
        ("\n".join(HUNDRED) + "\n\n\n", HUNDRED[-TAIL_LINES:], True),
        ("one\ntwo", ["one", "two"], False),
        ("first\n" + "y" * (2 * TAIL_BYTES) + "\nlast\n", ["last"], True),
        ("\n \n", None, False),
        (None, None, False),
    ],
    ids=["many lines", "few lines", "a huge line", "nothing in it", "no log"],
)
def test_a_log_ends_with_its_last_lines(
    tmp_path: Path, content: str | None, shown: list[str] | None, cut: bool
) -> None:
    if content is not None:
        (tmp_path / "log.txt").write_text(content)
    tail = log_tail(tmp_path)
    assert (tail is None) == (shown is None)
    if tail is not None:
        assert (tail.text.splitlines(), tail.lines) == (shown, len(shown or ()))
        assert tail.cut is cut


def test_a_log_is_shown_without_what_moves_a_cursor(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_bytes(
        b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07ok\x00\x08 \xff\n\ttab\r\n10 %\r20 %\r\n"
        + b"x" * 5000
    )
    tail = log_tail(tmp_path)
    assert tail is not None
    first, second, overwritten, last = tail.text.split("\n")
    assert first == "red ok\ufffd\ufffd \ufffd"
    assert second == "\ttab"
    assert overwritten == "20 %"
    assert last == "x" * LINE_CHARACTERS + " ..."


def test_alike_failures_are_told_once(tmp_path: Path) -> None:
    broke = Failure(reason="it broke", remedy="mend it", rank=1)
    other = Failure(reason="it broke otherwise")
    trials = [
        *(
            invented_trial("ddp", 2, repeat, outcome=Outcome.FAILED, failure=broke)
            for repeat in (0, 1)
        ),
        invented_trial("ddp", 2, 2, outcome=Outcome.FAILED, failure=other),
        invented_trial("ddp", 2, 3),
    ]
    found = not_ok(rows_of_trials(tmp_path / "run", *trials))
    assert [(one.repeats, one.reason, one.remedy, one.rank, len(one.logs)) for one in found] == [
        ("0, 1", "it broke", "mend it", 1, 2),
        ("2", "it broke otherwise", "", None, 1),
    ]


def test_machine_facts_leave_out_what_is_not_known() -> None:
    facts = machine_facts(
        {
            "host": "here",
            "os": "Debian",
            "kernel": "6",
            "cpu": {"model": "EPYC", "usable_cores": 2, "quota_cores": None},
            "memory": {"total_bytes": 2**34, "limit_bytes": None},
            "cuda": {"devices": [{"name": "H200", "memory_bytes": 150 * 2**30}]},
            "packages": {"torch": "2.11", "triton": None},
            "git": {"commit": "0123456789abcdef", "dirty": True},
            "load": {"average": [1, 0.5], "busy_processes": [{"name": "x", "cpu_percent": 9}]},
        }
    )
    assert facts == {
        "host": "here",
        "system": "Debian, 6",
        "processor": "EPYC, 2 usable cores",
        "memory": "16.0 GiB",
        "GPU": "H200 150.0 GiB",
        "packages": "torch 2.11",
        "git": "0123456789ab, with changes that are not committed",
        "load at the start": "average 1.00, 0.50; other busy processes: x (9 % CPU)",
    }


@pytest.mark.parametrize(
    "value", [None, 3, "text", [], [1, "x", None], {"devices": 4, "model": []}]
)
def test_machine_facts_take_whatever_stands_there(value: object) -> None:
    keys = ("date", "os", "cpu", "memory", "cuda", "packages", "variables", "git", "load")
    for text in machine_facts(dict.fromkeys(keys, value)).values():
        assert isinstance(text, str)
        assert text


def test_the_plan_is_counted(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", [invented_trial("single", 1)]))
    assert planned_trials(run) == 6, "single on one rank, ddp and fsdp on two; each twice"
    (note,) = progress_notes([run])
    assert note.startswith("1 of 6 planned trials have a result.")
    (run.path / "experiment.yaml").write_text("workload: 3")
    assert planned_trials(run) is None
    assert progress_notes([run]) == []


def test_every_trial_and_every_rank_is_listed(tmp_path: Path) -> None:
    lost = invented_rank(1).model_copy(update={"lost": "was killed"})
    rows = rows_of_trials(
        tmp_path / "run",
        invented_trial("single", 1),
        invented_trial("ddp", 2, ranks=(invented_rank(0), lost)),
        invented_trial("fsdp", 2, outcome=Outcome.FAILED),
    )
    trials, ranks = trials_table(rows), ranks_table(rows)
    assert trials.cells("label") == ("single", "ddp", "fsdp")
    assert trials.cells("outcome") == ("ok", "ok", "failed")
    assert ranks.cells("label") == ("single", "ddp", "ddp")
    assert ranks.cells("rank") == ("0", "0", "1")
    assert ranks.cells("ended early") == ("", "", "was killed")
    assert ranks.cells("samples/s")[0] == "199.7", "1248 samples in windows of 2.75 and 3.5 seconds"


def test_only_metrics_with_a_value_are_defined(tmp_path: Path) -> None:
    rows = rows_of_trials(tmp_path / "run", invented_trial("single", 1))
    names = [one.name for one in definitions(rows)]
    assert "samples_per_second" in names
    assert "mfu" not in names


def test_the_method_names_the_runs_own_settings(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", [invented_trial("single", 1)]))
    text = " ".join(method([run]).values())
    assert "the first 5 steps" in text
    assert "run 2 times" in text
    (run.path / "experiment.yaml").unlink()
    assert "the warm-up steps" in " ".join(method([run]).values())


def checked(result: TrialResult, **fields: object) -> TrialResult:
    """With all in its trial that a verdict refers to."""
    inside = {**result.trial, "strategy": STRATEGY_SPEC, "world_size": result.world_size}
    return result.model_copy(update={"trial": inside, **fields})


def verdict_of(result: TrialResult, **fields: object) -> Verdict:
    from shardmark.trials.trial import cell_id

    content: dict[str, object] = {
        "id": cell_id(result.trial),
        "strategy": result.strategy,
        "strategy_options": {"bucket_mb": 1},
        "world_size": result.world_size,
        "precision": "fp32",
        "varied": {},
        "equivalent": True,
        "checks": (),
        "cause": None,
    }
    return Verdict.model_validate(content | fields)


CAUSE = Cause(text="summed", evidence="twice", setting="averaging", first_deviation="gradients")
CHECK = Check(name="losses", holds=False, found=2.0, expected=1.0, tolerance=0.5, in_tolerances=2.0)


def test_verdicts_tell_cause_and_checks(tmp_path: Path) -> None:
    trial = checked(invented_trial("ddp", 2))
    folder = write_run(tmp_path / "run", [trial])
    verdict = verdict_of(trial, equivalent=False, cause=CAUSE, checks=(CHECK,))
    write_verification(folder, Verification(reference="one", steps=3, verdicts=(verdict,)))
    ((line,),) = (one.verdicts for one in verified([load_run(folder)]))
    assert line.place == "ddp (bucket_mb=1) on 2 ranks, fp32"
    assert (line.word, line.mood, line.worst) == ("not equivalent", "bad", "2")
    assert line.cause == CAUSE
    assert line.checks.rows == (("losses", "deviates", "2", "1", "0.5", ""),)


def test_nothing_verified_is_nothing_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [invented_trial("ddp", 2)])
    assert verified([load_run(folder)]) == []
