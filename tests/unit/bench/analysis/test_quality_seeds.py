"""Qualities over seeds: intervals, verdicts, and what one seed cannot show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from shardmark.base.results.schema import StabilityFinding, StabilityKind, TrialResult
from shardmark.base.results.store import StoredRun
from shardmark.base.statistics.effects import paired_difference
from shardmark.bench.analysis.compare.comparison import Comparison, compare
from shardmark.bench.analysis.compare.epochs import epochs_of
from shardmark.bench.report.table.comparison import comparison_json
from shardmark.bench.report.table.notes import notes_of
from tests import present
from tests.golden.invented import compare_trials, invented_trial, two_epoch_rank

DDP = (0.0463, 0.060, 0.010, 0.044)
FSDP = (0.0663, 0.040, 0.066, 0.064)
"""Differences of +0.020, -0.020, +0.056 and +0.020, of which the first alone looks like a gain."""


def trials(strategy: str, maps: Sequence[float], *, seeds: bool = True) -> list[TrialResult]:
    made = [
        invented_trial(
            strategy,
            2,
            repeat,
            metrics={"map": value, "accuracy_top1": None},
            ranks=tuple(two_epoch_rank(rank, (1.5 + repeat, 0.5 + repeat)) for rank in range(2)),
        )
        for repeat, value in enumerate(maps)
    ]
    for trial in made:
        trial.trial["recipe"]["seed"] = trial.repeat if seeds else 0
        trial.trial["strategy"] = {"name": strategy}
    return made


def compared(*, seeds: bool = True, fsdp: Sequence[float] = FSDP) -> Comparison:
    both = [*trials("ddp", DDP, seeds=seeds), *trials("fsdp", fsdp, seeds=seeds)]
    return compare_trials(*both, baseline="ddp")


def test_a_difference_over_four_seeds_that_shows_nothing() -> None:
    ddp, fsdp = compared().rows
    assert (ddp.seeds, ddp.quality_verdict) == (4, None)
    difference = present(fsdp.quality_difference)
    estimate = difference.estimate
    assert (estimate.value, estimate.half_width) == pytest.approx((0.019, 0.0494), abs=1e-4)
    assert estimate.n == 4
    # t = 0.019 / (0.03105 / 2) with three degrees of freedom
    assert difference.p_corrected == pytest.approx(0.3087, abs=1e-3)
    assert fsdp.quality_verdict == "no difference shown"
    notes = " ".join(note.text for note in notes_of(compared()))
    assert "means over 4 seeds" in notes
    assert "fsdp on 2 ranks +0.0190 ±0.0494, no difference shown" in notes
    (_, document) = comparison_json(compared())["rows"]
    assert document["seeds"] == 4
    assert document["quality_effect"]["difference"] == pytest.approx(0.019)
    assert document["quality_effect"]["metric"] == "map"


@pytest.mark.parametrize(("gain", "verdict"), [(0.03, "better"), (-0.005, "worse"), (3e-6, "tie")])
def test_a_difference_that_all_seeds_share_is_shown(gain: float, verdict: str) -> None:
    """Differences vary by a fiftieth from seed to seed; the seeds among one another by far more."""
    fsdp = [value + gain * (1 + 0.02 * (-1) ** seed) for seed, value in enumerate(DDP)]
    *_, row = compared(fsdp=fsdp).rows
    assert row.quality_verdict == verdict
    assert present(row.quality_difference).estimate.value == pytest.approx(gain)


def test_one_seed_has_no_interval_and_no_verdict_of_a_quality() -> None:
    comparison = compared(seeds=False)
    for row in comparison.rows:
        quality, rate = row.metrics["map"], row.metrics["samples_per_second"]
        assert quality is not None
        assert (quality.low, quality.high, quality.n) == (None, None, 4)
        assert present(rate).low is not None, "the speed of a repeat does vary"
        assert row.quality_verdict is None
        assert row.quality_difference is None
        assert epochs_of(row).epochs[-1].metrics["train_loss"].half_width is None  # type: ignore[union-attr]
    notes = " ".join(note.text for note in notes_of(comparison))
    assert "from one seed" in notes
    seeded = compared().rows[0]
    assert seeded.metrics["map"].half_width == pytest.approx(0.0526, abs=0.02)  # type: ignore[union-attr]
    assert epochs_of(seeded).epochs[-1].metrics["train_loss"].half_width is not None  # type: ignore[union-attr]


def test_equal_differences_of_qualities_prove_nothing() -> None:
    same = present(paired_difference([0.5, 0.6], [0.4, 0.5]))
    assert same.p_value == 1.0
    assert paired_difference([0.5], [0.4]) is None
    zero = present(paired_difference([0.0, 0.0, 0.2], [0.0, 0.1, 0.0]))
    assert zero.estimate.value == pytest.approx(0.1 / 3)
    assert present(zero.spread).variance == pytest.approx(0.07 / 3)  # values: 0, -0.1 and 0.2


def test_rounding_is_compared_with_the_seed_of_the_twin() -> None:
    """Repeats of other seeds are far away, and say nothing of rounding."""
    ddp = trials("ddp", (0.50, 0.90, 0.10))
    fsdp = trials("fsdp", (0.51, 0.20, 0.80))
    twin = trials("ddp", (0.52,))[0]
    twin = twin.model_copy(update={"id": "twin", "trial": {**twin.trial, "twin": True}})
    for trial in (*ddp, *fsdp):
        trial.trial.update({"measure": {"seeds": 3}, "repeat": trial.repeat})
    run = StoredRun(path=Path("run"), trials=(*ddp, *fsdp), twins=(twin,))
    comparison = compare([run], "ddp")
    (rounding,) = comparison.rounding
    assert rounding.distance == pytest.approx(0.02)


def test_disturbed_trials_count_for_quality_and_memory_and_not_for_the_speed() -> None:
    ddp = trials("ddp", DDP)
    noise = StabilityFinding(kind=StabilityKind.OTHER_PROCESSES, text="busy", severity=0.9)
    ddp[1] = ddp[1].model_copy(update={"stability": (noise,)})
    (row,) = compare_trials(*ddp, baseline="ddp").rows
    rate, quality = row.metrics["samples_per_second"], row.metrics["map"]
    assert (present(rate).n, present(quality).n, row.seeds) == (3, 4, 4)
    peak = present(row.metrics["peak_memory_bytes"])
    assert peak.n == 4
    last = epochs_of(row).epochs[-1].metrics
    by_epoch = {name: last[name] for name in ("epoch_seconds", "elapsed_seconds", "train_loss")}
    assert [e.n for e in by_epoch.values() if e is not None] == [3, 3, 4]
