"""Soonest to a quality, the best quality in a given time, and what guessing could reach."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.statistics.sampling import is_chance
from tests.unit.recommendation.invented_rows import compared
from tests.unit.recommendation.questions import ASYNC, DDP, SINGLE, line_of, one_of, with_


def test_quality_is_the_time_to_what_all_reach(tmp_path: Path) -> None:
    """`single` reaches 0.8 at its end, and 0.4 after one of two epochs, `ddp` 0.6 at its end."""
    single = with_(SINGLE, qualities=(0.8,))
    ddp = with_(DDP, qualities=(0.6,))
    comparison = compared(tmp_path, [single, ddp])
    one = one_of(comparison, "quality")
    assert one.target == pytest.approx(0.6)
    assert one.selection is not None
    times = {row.strategy: seconds for row, seconds in one.selection.values}
    assert times["ddp"] == pytest.approx(2 * 640 / 181, rel=1e-3)
    assert times["single"] == pytest.approx(2 * 640 / 100, rel=1e-3)
    assert line_of(comparison, "Soonest").startswith(
        "Soonest to top-1 60.0 %, which every candidate reaches: ddp on 2 ranks, 7.07 s, 45 %"
        " sooner (95 % interval "
    )


def test_quality_in_the_time_of_the_fastest(tmp_path: Path) -> None:
    """`ddp` trains 7.11 s at most; `single` has done one epoch of 6.4 s then, with half of 0.8."""
    cells = [with_(SINGLE, qualities=(0.8,)), with_(DDP, qualities=(0.6,))]
    comparison = compared(tmp_path, cells)
    found = one_of(comparison, "quality").in_time
    assert found is not None
    assert found.seconds == pytest.approx(2 * 640 / 180)
    assert [row.strategy for row, _ in found.values] == ["ddp", "single"]
    assert [value for _, value in found.values] == pytest.approx([0.6, 0.4])
    assert line_of(comparison, "Best top-1") == (
        "Best top-1 in the 7.11 s that ddp on 2 ranks trains: ddp on 2 ranks 60.0 %, then single on"
        " 1 rank 40.0 % (one seed: no order is shown)."
    )


def test_who_has_learned_nothing_in_time_and_who_is_too_close_to_tell(tmp_path: Path) -> None:
    """360 digits: 60 and 57 % are within 7 points.  At 80 samples/s one epoch takes 8 s."""
    cells = [
        with_(SINGLE, rates=(80,), qualities=(0.8,)),
        with_(DDP, qualities=(0.6,)),
        with_(DDP, strategy="zero-2", rates=(181, 180, 182), qualities=(0.57,)),
    ]
    line = line_of(compared(tmp_path, cells), "Best top-1")
    assert "1 other lies within the sampling error of the first; 1 had no epoch done" in line


@pytest.mark.parametrize(
    ("dataset", "quality", "remark"),
    [
        ("digits", 0.12, " (guessing reaches it, too)"),
        ("digits", 0.20, ""),
        ("imagefolder", 0.20, " (may be chance: the number of classes is not recorded)"),
        ("imagefolder", 0.99, " (may be chance: the number of classes is not recorded)"),
    ],
)
def test_a_target_that_guessing_reaches_is_flagged(
    tmp_path: Path, dataset: str, quality: float, remark: str
) -> None:
    """Ten digits and 360 samples: guessing ends below 13.1 %."""
    comparison = compared(tmp_path, [with_(one, qualities=(quality,)) for one in (SINGLE, DDP)])
    rows = tuple(
        replace(
            row,
            trials=tuple(
                trial.model_copy(update={"trial": trial.trial | {"workload": {"dataset": dataset}}})
                for trial in row.trials
            ),
        )
        for row in comparison.rows
    )
    line = line_of(replace(comparison, rows=rows), "Soonest")
    assert f"which every candidate reaches{remark}: ddp" in line


def test_unknown_classes_are_two_at_least(tmp_path: Path) -> None:
    (row,) = compared(tmp_path, [DDP]).rows
    trial = row.trials[0].model_copy(
        update={"trial": {"workload": {"dataset": "imagefolder", "validation_samples": 400}}}
    )
    row = replace(row, trials=(trial,))
    assert is_chance(row, "accuracy_top1", 0.50) is None
    assert is_chance(row, "accuracy_top1", 0.56) is False
    assert is_chance(row, "validation_loss", 0.1) is False


def test_rows_that_ended_below_the_target_are_counted(tmp_path: Path) -> None:
    """One repeat reaches 0.8 and then falls: the epochs are turned round."""
    comparison = compared(tmp_path, [with_(one, qualities=(0.8,)) for one in (SINGLE, DDP)])
    rows = (comparison.rows[0], _falling(comparison.rows[1]))
    one = one_of(replace(comparison, rows=rows), "quality")
    assert [row.strategy for row in one.ended_below] == [rows[1].strategy]
    line = line_of(replace(comparison, rows=rows), "Soonest")
    assert "(1 of 2 rows ended below it again)" in line


def _falling(row: Row) -> Row:
    """The same qualities, the later one first."""
    trials = []
    for trial in row.trials:
        ranks = []
        for rank in trial.ranks:
            first, last = rank.epochs
            turned = (
                first.model_copy(update={"quality": last.quality}),
                last.model_copy(update={"quality": first.quality}),
            )
            ranks.append(rank.model_copy(update={"epochs": turned}))
        trials.append(trial.model_copy(update={"ranks": tuple(ranks)}))
    return replace(row, trials=tuple(trials))


def test_asynchronous_that_misses_the_target_has_no_time(tmp_path: Path) -> None:
    cells = [with_(one, qualities=(0.8,)) for one in (SINGLE, DDP)]
    one = one_of(compared(tmp_path, [*cells, ASYNC]), "quality")
    assert [weaker.value for weaker in one.weaker] == [None]
    assert one.weaker[0].quality is not None


def test_without_evaluation_no_quality(tmp_path: Path) -> None:
    line = line_of(compared(tmp_path, [SINGLE, DDP]), "Soonest")
    assert line == "Soonest to a quality: no answer: the validation set was not evaluated."
