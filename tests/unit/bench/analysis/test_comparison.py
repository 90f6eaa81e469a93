"""Rows hold the repeats of one cell, and are related only to what trained the same thing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.errors import InputError
from shardmark.base.layout import data_parallel
from shardmark.base.metrics import METRICS
from shardmark.base.results.fingerprint import DataRecord, Fingerprint
from shardmark.base.results.schema import Failure, Outcome, TrialResult
from shardmark.base.results.store import StoredRun
from shardmark.base.statistics.intervals import Estimate
from shardmark.bench.analysis.compare.comparison import Comparison, compare
from shardmark.bench.analysis.compare.rows import Row
from tests import present
from tests.golden.invented import compare_trials, invented_trial


def stored(trials: Sequence[TrialResult], path: str = "run") -> StoredRun:
    return StoredRun(path=Path(path), trials=tuple(trials))


def row_of(comparison: Comparison, strategy: str, world_size: int) -> Row:
    key = (strategy, world_size)
    (row,) = (row for row in comparison.rows if (row.strategy, row.world_size) == key)
    return row


def estimate_of(row: Row, name: str) -> Estimate:
    estimate = row.metrics[name]
    assert estimate is not None, row.missing[name]
    return estimate


def value(row: Row, name: str) -> float | None:
    estimate = row.metrics[name]
    return None if estimate is None else estimate.value


def rate(samples_per_second: float) -> dict[str, float | None]:
    return {"samples_per_second": samples_per_second}


def test_repeats_of_a_cell_are_one_row() -> None:
    (row,) = compare_trials(*(invented_trial(repeat=repeat) for repeat in (2, 0, 1))).rows
    assert row.outcomes == {"ok": 3}
    assert set(row.metrics) == set(METRICS)
    estimate = estimate_of(row, "samples_per_second")
    assert estimate.n == 3
    assert present(estimate.low) < estimate.value == pytest.approx(800 / 1.1 * 1.02)


def test_rows_come_in_a_fixed_order() -> None:
    trials = [
        invented_trial(strategy, size, varied={"recipe.global_batch": batch})
        for batch in (256, 64)
        for strategy, size in (("zero-2", 2), ("ddp", 4), ("ddp", 2), ("single", 1))
    ]
    rows = compare_trials(*trials).rows
    assert [(row.varied["recipe.global_batch"], row.strategy, row.world_size) for row in rows] == [
        (batch, strategy, size)
        for batch in (64, 256)
        for strategy, size in (("single", 1), ("ddp", 2), ("ddp", 4), ("zero-2", 2))
    ]


def test_options_precision_and_varied_keys_make_rows() -> None:
    rows = compare_trials(
        invented_trial(),
        invented_trial(precision="bf16", varied={"recipe.precision": "bf16"}),
        invented_trial(strategy_options={"bucket_mb": 1}),
        invented_trial(varied={"recipe.global_batch": 8}),
        invented_trial(varied={"recipe.optimizer": {"name": "adam", "lr": 0.1}}),
    ).rows
    assert {row.place for row in rows} == {
        "ddp on 2 ranks",
        "ddp on 2 ranks, bf16",
        "ddp (bucket_mb=1) on 2 ranks",
        "ddp on 2 ranks, recipe.global_batch=8",
        'ddp on 2 ranks, recipe.optimizer={"lr": 0.1, "name": "adam"}',
    }


def test_speedup_efficiency_and_memory_against_single() -> None:
    comparison = compare_trials(
        invented_trial("single", 1, metrics=rate(100) | {"peak_memory_bytes": 1000.0}),
        invented_trial("ddp", 2, metrics=rate(180) | {"peak_memory_bytes": 1500.0}),
        invented_trial("ddp", 4, metrics=rate(324) | {"peak_memory_bytes": None}),
    )
    single, two, four = comparison.rows
    assert [value(row, "speedup") for row in comparison.rows] == pytest.approx([1, 1.8, 3.24])
    assert value(single, "scaling_efficiency") == pytest.approx(1)
    assert value(two, "scaling_efficiency") == pytest.approx(0.9)  # against `single`
    assert value(four, "scaling_efficiency") == pytest.approx(0.9)  # against ddp on two ranks
    assert value(two, "memory_ratio") == pytest.approx(1.5)
    assert value(four, "memory_ratio") is None
    assert four.missing["memory_ratio"].startswith("ddp on 4 ranks has no peak_memory_bytes: ")
    assert (single.verdict, two.baseline) == ("baseline", "single on 1 rank")
    assert comparison.notes == ()


def test_efficiency_goes_by_the_layout_s_devices() -> None:
    """A process that drives two devices has grown twofold."""
    comparison = compare_trials(
        invented_trial("single", 1, metrics=rate(100)),
        invented_trial("ddp", 1, metrics=rate(180), layout=data_parallel(2)),
    )
    assert value(row_of(comparison, "ddp", 1), "scaling_efficiency") == pytest.approx(0.9)


def test_named_baseline_at_the_same_size_else_its_smallest() -> None:
    comparison = compare_trials(
        *(invented_trial("ddp", size, metrics=rate(100 * size)) for size in (2, 4)),
        *(invented_trial("fsdp", size, metrics=rate(50 * size)) for size in (4, 8)),
        invented_trial("ddp", 2, metrics=rate(100), strategy_options={"bucket_mb": 1}),
        baseline="ddp",
    )
    assert value(row_of(comparison, "fsdp", 4), "speedup") == pytest.approx(0.5)
    assert value(row_of(comparison, "fsdp", 8), "speedup") == pytest.approx(2)
    assert row_of(comparison, "ddp", 4).verdict == "baseline"
    assert row_of(comparison, "fsdp", 8).baseline == "ddp on 2 ranks", "the bare one"


def test_unknown_baseline_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"'zero2'; measured were single, zero-2; did .* 'zero-2'"):
        compare_trials(invented_trial("single", 1), invented_trial("zero-2", 2), baseline="zero2")
    with pytest.raises(InputError, match="measured were none"):
        compare_trials(baseline="ddp")


def test_other_conditions_are_no_baseline() -> None:
    comparison = compare_trials(
        invented_trial("single", 1, varied={"recipe.global_batch": 64}),
        invented_trial("ddp", 2, varied={"recipe.global_batch": 256}),
        invented_trial("fsdp", 2, varied={"recipe.global_batch": 64}, precision="bf16"),
    )
    for strategy in ("ddp", "fsdp"):
        row = row_of(comparison, strategy, 2)
        for name in ("speedup", "memory_ratio", "scaling_efficiency"):
            assert row.metrics[name] is None
        assert row.baseline is row.verdict is None
        assert "under the same conditions" in row.missing["scaling_efficiency"]
    assert len(comparison.notes) == 1, "said once"
    assert (
        row_of(comparison, "fsdp", 2).missing["speedup"].endswith("at bf16, recipe.global_batch=64")
    )


def test_rows_with_other_execution_options_are_compared() -> None:
    """`{name: fsdp, cpu_offload: true}` sets for itself what `single` leaves at false."""
    offload = "recipe.cpu_offload"
    trials = [
        invented_trial("single", 1, metrics=rate(100), varied={offload: False}),
        invented_trial("fsdp", 2, metrics=rate(150), varied={offload: True}),
    ]
    comparison = compare_trials(*trials)
    assert value(row_of(comparison, "fsdp", 2), "speedup") == pytest.approx(1.5)
    (note,) = comparison.notes
    assert ": compared with single on 1 rank, recipe.cpu_offload=false" in note
    exact = invented_trial("single", 1, metrics=rate(50), varied={offload: True})
    assert value(row_of(compare_trials(*trials, exact), "fsdp", 2), "speedup") == pytest.approx(3)


def test_failed_trials_have_an_outcome_and_no_metrics() -> None:
    failure = Failure(reason="rank 1 ran out of memory", remedy="use a smaller batch", rank=1)
    comparison = compare_trials(
        invented_trial("single", 1),
        invented_trial(repeat=0, metrics=rate(150)),
        invented_trial(repeat=1, outcome=Outcome.OUT_OF_MEMORY, failure=failure),
        invented_trial(repeat=2, outcome=Outcome.OUT_OF_MEMORY, failure=failure),
        invented_trial("fsdp", 2).model_copy(update={"outcome": Outcome.TIMED_OUT}),
    )
    ddp, fsdp = row_of(comparison, "ddp", 2), row_of(comparison, "fsdp", 2)
    assert ddp.outcomes == {"ok": 1, "out_of_memory": 2}
    assert estimate_of(ddp, "samples_per_second").n == 1
    (failed,) = ddp.failed
    assert (failed.count, failed.outcome) == (2, Outcome.OUT_OF_MEMORY)
    assert failed.reason == "rank 1 ran out of memory; use a smaller batch"
    assert set(fsdp.metrics.values()) == {None}, "what a failed trial measured is not believed"
    assert fsdp.missing["step_seconds"] == "no trial ended ok"
    assert fsdp.missing["speedup"].endswith("has no samples_per_second: no trial ended ok")
    assert fsdp.failed[0].reason == "no reason was recorded"


@pytest.mark.parametrize(
    ("single", "reason"),
    [({"outcome": Outcome.FAILED}, "no trial ended ok"), ({"metrics": rate(0)}, "it is zero")],
)
def test_a_baseline_without_a_rate_gives_one_note(single: dict[str, Any], reason: str) -> None:
    comparison = compare_trials(
        invented_trial("single", 1, **single), invented_trial("ddp", 2), invented_trial("fsdp", 2)
    )
    assert value(row_of(comparison, "ddp", 2), "speedup") is None
    (note,) = comparison.notes
    assert note == f"no speed-up: single on 1 rank has no samples_per_second: {reason}"


def test_not_a_number_is_missing_and_a_share_s_interval_ends_at_one() -> None:
    trials = (
        invented_trial(repeat=0, metrics={"train_loss": math.nan, "accuracy_top1": 0.9}),
        invented_trial(repeat=1, metrics={"train_loss": 2.0, "accuracy_top1": 0.95}),
    )
    for trial in trials:
        trial.trial["recipe"]["seed"] = trial.repeat
    (row,) = compare_trials(*trials).rows
    loss, accuracy = (estimate_of(row, name) for name in ("train_loss", "accuracy_top1"))
    assert (loss.value, loss.n) == (2.0, 1)
    assert 0 < present(accuracy.low) < 0.9
    assert accuracy.high == 1.0


def test_rows_of_different_runs_are_not_compared() -> None:
    """Not even two of the same experiment: they may come from two machines."""
    runs = [
        stored([invented_trial("single", 1)], "here"),
        stored([invented_trial("ddp", 2)], "there"),
    ]
    single, ddp = compare(runs).rows
    assert (single.experiment, ddp.experiment) == ("invented (here)", "invented (there)")
    assert value(ddp, "speedup") is None


def test_nodes_differ_and_are_compared() -> None:
    """A single node is the baseline of two; more nodes are no smaller world size."""
    _, *rows = compare_trials(
        invented_trial("single", 1, varied={"placement.nodes": 1}),
        invented_trial("ddp", 2, varied={"placement.nodes": 1}),
        invented_trial("ddp", 2, varied={"placement.nodes": 2}),
    ).rows
    assert len(rows) == 2
    for row in rows:
        assert row.metrics["speedup"] is not None
        assert row.baseline == "single on 1 rank, nodes=1"
        assert row.metrics["scaling_efficiency"] is not None


@pytest.mark.parametrize(("factor", "doubted"), [(1.4, False), (1.7, True)])
def test_impossible_speed_up_is_not_decided(factor: float, doubted: bool) -> None:
    """A speed-up above perfect scaling means that one of the two was disturbed unnoticed."""
    trials = [invented_trial("single", 1, repeat, metrics=rate(100 + repeat)) for repeat in (0, 1)]
    trials += [invented_trial(repeat=n, metrics=rate(200 * factor + n)) for n in (0, 1)]
    row = row_of(compare_trials(*trials), "ddp", 2)
    assert bool(row.disturbed) is doubted
    assert (row.verdict == "not decided") is doubted
    for name in ("speedup", "scaling_efficiency"):
        assert (row.metrics[name] is None) is doubted
        assert not doubted or "1.7 times the rate of perfect scaling" in row.missing[name]


def test_runs_of_different_data_have_a_note() -> None:
    """The user's files have changed between two runs; versions may differ."""

    def run(path: str, index: str, torch: str) -> StoredRun:
        data = {"data/mine.txt": DataRecord(files=1, index_sha256=index)}
        fingerprint = Fingerprint(data=data, versions={"torch": torch})
        return replace(stored([invented_trial("ddp")], path), fingerprint=fingerprint)

    same = compare([run("runs/a", "1" * 64, "2.14"), run("runs/b", "1" * 64, "2.15")])
    other = compare([run("runs/a", "1" * 64, "2.15"), run("runs/b", "2" * 64, "2.15")])
    (added,) = set(other.notes) - set(same.notes)
    assert "between runs/a and runs/b changed: data/mine.txt (names, sizes" in added


def test_a_reason_of_several_ranks_is_one_reason() -> None:
    def failed(repeat: int, reason: str, rank: int) -> TrialResult:
        failure = Failure(reason=reason, remedy="see log.txt", rank=rank)
        return invented_trial(repeat=repeat, outcome=Outcome.FAILED, failure=failure)

    trials = [
        failed(0, "rank 0: no such file\n[launcher] File x.py", 0),
        failed(1, "rank 1: no such file (rank 1 is on node-b)", 1),
        failed(2, "rank 1: killed", 1),
    ]
    reasons = {
        failed.reason: failed.count for failed in row_of(compare_trials(*trials), "ddp", 2).failed
    }
    assert reasons == {"no such file; see log.txt": 2, "rank 1: killed; see log.txt": 1}
