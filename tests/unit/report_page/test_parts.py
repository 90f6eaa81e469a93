"""The parts of the page as data."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmark.analysis.compare.comparison import compare
from shardmark.analysis.compare.rows import Row
from shardmark.report.page.facts import machine_facts, planned_trials, progress_notes
from shardmark.report.page.outcomes import LINE_CHARACTERS, TAIL_BYTES, TAIL_LINES, log_tail, not_ok
from shardmark.report.page.tables import definitions, ranks_table, trials_table, verified
from shardmark.results.schema import Failure, Outcome, TrialResult
from shardmark.results.store import load_run
from shardmark.results.verification import Cause, Check, Verdict, Verification, write_verification
from tests.golden.invented import invented_rank, invented_trial, write_run


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
    long = "x" * LINE_CHARACTERS + " ..."
    assert tail.text.split("\n") == ["red ok \ufffd", " tab", "20 %", long]


def test_alike_failures_are_told_once(tmp_path: Path) -> None:
    broke = Failure(reason="it broke", remedy="mend it", rank=1)
    other = Failure(reason="it broke otherwise")
    rows = rows_of_trials(
        tmp_path / "run",
        *(
            invented_trial("ddp", 2, repeat, outcome=Outcome.FAILED, failure=failure)
            for repeat, failure in enumerate((broke, broke, other))
        ),
        invented_trial("ddp", 2, 3),
    )
    assert [(group.repeats, group.failure, len(group.logs)) for group in not_ok(rows)] == [
        ("0, 1", broke, 2),
        ("2", other, 1),
    ]


def test_machine_facts_leave_out_what_is_not_known() -> None:
    facts = machine_facts(
        {
            "host": "here",
            "os": "Debian",
            "kernel": None,
            "cpu": {"model": "EPYC", "usable_cores": 2, "quota_cores": None},
            "memory": {"total_bytes": 2**34, "limit_bytes": None},
            "cuda": {"devices": [{"name": "H200", "memory_bytes": 150 * 2**30}]},
            "packages": {"torch": "2.11", "triton": None},
            "variables": {"OMP_NUM_THREADS": "1"},
            "python_executable": "/here",
            "git": {"commit": "0123456789abcdef", "dirty": True},
            "load": {"average": [1, 0.5], "busy_processes": [{"name": "x", "cpu_percent": 9}]},
        }
    )
    assert facts == {
        "host": "here",
        "os": "Debian",
        "cpu": "model EPYC, usable cores 2",
        "memory": "total 16.0 GiB",
        "cuda": "devices name H200, memory 150.0 GiB",
        "packages": "torch 2.11",
        "variables": "OMP_NUM_THREADS 1",
        "git": "commit 0123456789abcdef, dirty yes",
        "load": "average 1; 0.5, busy processes name x, cpu percent 9",
    }


@pytest.mark.parametrize(
    "value", [None, 3, "text", [], [1, "x", None], {"devices": 4, "model": []}]
)
def test_machine_facts_take_whatever_stands_there(value: object) -> None:
    keys = ("date", "os", "cpu", "memory", "cuda", "packages", "variables", "git", "load")
    assert all(machine_facts(dict.fromkeys(keys, value)).values())


def test_the_plan_is_counted(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", [invented_trial("single", 1)]))
    assert planned_trials(run) == 6, "single on one rank, ddp and fsdp on two; each twice"
    (note,) = progress_notes([run])
    assert note.startswith("1 of 6 planned trials")
    (run.path / "experiment.yaml").write_text("workload: 3")
    assert planned_trials(run) is None
    assert progress_notes([run]) == []


def test_every_trial_rank_and_known_metric_is_listed(tmp_path: Path) -> None:
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
    metrics = definitions(rows).cells("metric")
    assert "samples_per_second" in metrics
    assert "mfu" not in metrics


def test_verdicts_tell_cause_and_checks(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [invented_trial("ddp", 2)])
    assert verified([load_run(folder)]) == []
    verdict = Verdict(
        id="ddp",
        strategy="ddp",
        strategy_options={"bucket_mb": 1},
        world_size=2,
        precision="fp32",
        varied={},
        equivalent=False,
        checks=(
            Check(
                name="losses", holds=False, found=2.0, expected=1.0, tolerance=0.5, in_tolerances=2
            ),
        ),
        cause=Cause(text="summed", evidence="twice", setting="averaging", first_deviation="loss"),
    )
    write_verification(folder, Verification(reference="one", steps=3, verdicts=(verdict,)))
    (run,) = verified([load_run(folder)])
    assert run.verdicts.rows == (
        (
            "ddp (bucket_mb=1) on 2 ranks, fp32",
            "not equivalent",
            "2",
            "summed. Evidence: twice. Setting: averaging. First deviation: loss.",
        ),
    )
    assert [table.rows for table in run.checks] == [(("losses", "deviates", "2", "1", "0.5", ""),)]
