"""Why sharding saves little, why quality differs, who is waited for, what staleness costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.diagnose.explanations import explain
from shardmark.analysis.diagnose.surprise import Explanation, Kind
from shardmark.report.answers.explanations import explanation_lines, explanation_text
from shardmark.results.verification import Check, Verdict, Verification, write_verification
from shardmark.trials.trial import cell_id
from tests.golden.invented import invented_rank
from tests.unit.recommendation.invented_rows import MIB, Cell, compared


def _only(comparison: Comparison, kind: Kind) -> Explanation:
    (found,) = [one for one in explain(comparison) if one.kind == kind]
    return found


def _none(comparison: Comparison, kind: Kind) -> bool:
    return not [one for one in explain(comparison) if one.kind == kind]


def _memory(strategy: str, *, state: float, activations: float, size: int = 2) -> Cell:
    """In MiB; a quarter of the state are parameters, a quarter gradients."""
    return Cell(
        strategy=strategy,
        world_size=size,
        rates=(100.0,),
        peaks=((state + activations) * MIB,),
        metrics={
            "parameter_bytes": state / 4 * MIB,
            "gradient_bytes": state / 4 * MIB,
            "optimizer_state_bytes": state / 2 * MIB,
            "activation_peak_bytes": activations * MIB,
        },
    )


def test_activations_dominate(tmp_path: Path) -> None:
    cells = [
        _memory("ddp", state=40, activations=200),
        _memory("fsdp", state=20, activations=201),
    ]
    one = _only(compared(tmp_path, cells), "sharding saves little")
    assert one.difference == pytest.approx(19 * MIB)
    assert one.facts["possible_bytes"] == pytest.approx(20 * MIB)
    assert one.unexplained == pytest.approx(0)
    assert explanation_text(one) == (
        "Sharding saves little: fsdp on 2 ranks saves 19.0 MiB (7.9 %) of ddp's 240 MiB. It shards"
        " all model state, which saves 20.0 MiB at most. Changed: optimizer state -10.0 MiB,"
        " parameters -5.00 MiB, gradients -5.00 MiB."
    )


def test_sharding_that_needs_more(tmp_path: Path) -> None:
    cells = [
        _memory("ddp", state=40, activations=100),
        _memory("zero-2", state=30, activations=130),
    ]
    text = explanation_text(_only(compared(tmp_path, cells), "sharding saves little"))
    assert "zero-2 on 2 ranks needs 20.0 MiB (14 %) more than ddp's 140 MiB" in text
    assert "It shards gradients and optimizer state, which saves 15.0 MiB at most" in text
    assert "Changed: activations and buffers +30.0 MiB, optimizer state -5.00 MiB" in text


def test_zero_1_is_held_to_the_optimizer_state_alone(tmp_path: Path) -> None:
    cells = [
        _memory("ddp", state=40, activations=100),
        _memory("zero-1", state=30, activations=100),
    ]
    one = _only(compared(tmp_path, cells), "sharding saves little")
    assert one.facts["possible_bytes"] == pytest.approx(10 * MIB)
    assert "It shards optimizer state, which saves 10.0 MiB at most" in explanation_text(one)


def test_what_no_part_holds_is_the_rest(tmp_path: Path) -> None:
    """The peaks of the kinds need not fall together: 4 MiB are in none of them."""
    fsdp = _memory("fsdp", state=20, activations=200)
    cells = [
        _memory("ddp", state=40, activations=200),
        replace(fsdp, peaks=(224 * MIB,)),
    ]
    one = _only(compared(tmp_path, cells), "sharding saves little")
    assert one.unexplained == pytest.approx(-4 * MIB)
    assert "parameters -5.00 MiB, gradients -5.00 MiB, the rest +4.00 MiB" in explanation_text(one)


@pytest.mark.parametrize("fullest", ["ps-sync", "zero-3"])
def test_only_ddp_is_the_yardstick_and_only_sharding_is_judged(
    tmp_path: Path, fullest: str
) -> None:
    """A server that holds more says nothing of `ddp`, nor of a strategy that shards."""
    cells = [_memory("ddp", state=40, activations=100), _memory(fullest, state=90, activations=100)]
    found = explain(compared(tmp_path, cells))
    rows = [one.row.strategy for one in found if one.kind == "sharding saves little"]
    assert rows == (["zero-3"] if fullest == "zero-3" else [])
    alone = [
        _memory("zero-3", state=40, activations=99),
        _memory("ps-sync", state=90, activations=9),
    ]
    assert _none(compared(tmp_path / "alone", alone), "sharding saves little")


def test_sharding_that_saves_is_no_surprise(tmp_path: Path) -> None:
    cells = [_memory("ddp", state=200, activations=40), _memory("fsdp", state=100, activations=40)]
    assert _none(compared(tmp_path, cells), "sharding saves little")


def test_replicas_are_not_expected_to_save(tmp_path: Path) -> None:
    cells = [_memory("ddp", state=40, activations=200), _memory("same", state=40, activations=199)]
    assert _none(compared(tmp_path, cells), "sharding saves little")


def _verified(path: Path, comparison: Comparison, where: str) -> Comparison:
    """With a verification that met such a buffer on every row of several ranks."""
    verdicts = tuple(
        Verdict(
            id=cell_id(row.trials[0].trial),
            strategy=row.strategy,
            strategy_options={},
            world_size=row.world_size,
            precision=row.precision,
            varied={},
            equivalent=True,
            checks=(
                Check(
                    name="buffers", holds=True, found=0.0, expected=0.0, tolerance=0.0, where=where
                ),
            ),
            cause=None,
        )
        for row in comparison.rows
    )
    folder = path / "run"
    write_verification(folder, Verification(reference="alone", steps=3, verdicts=verdicts))
    return comparison


def _learning(*, ddp: tuple[float, ...] = (0.70, 0.71, 0.69)) -> list[Cell]:
    return [
        Cell(strategy="single", world_size=1, rates=(100.0,), qualities=(0.80, 0.81, 0.79)),
        Cell(strategy="ddp", world_size=2, rates=(180.0,), qualities=ddp),
    ]


def test_batch_norm_over_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.unit.recommendation.invented_rows.invented_rank",
        lambda rank: invented_rank(rank).model_copy(
            update={"settings": {"batch_norm": "statistics of each rank's share"}}
        ),
    )
    comparison = compared(tmp_path, _learning())
    comparison = _verified(tmp_path, comparison, "rank 1, bn1.running_mean")
    one = _only(comparison, "quality differs")
    assert (one.facts["samples"], one.facts["other_samples"]) == (32, 64)
    text = explanation_text(one)
    assert "top-1 of ddp on 2 ranks 70.0 %, of single on 1 rank 80.0 %" in text
    assert "BatchNorm averages over each rank's 32 samples against 64" in text
    assert text.startswith("Equivalent strategies end with different quality: ")


def test_one_seed_shows_no_quality(tmp_path: Path) -> None:
    one = _only(compared(tmp_path, _learning()), "quality differs")
    assert not one.shown
    assert "(one seed: not shown to be real)" in explanation_text(one)


def test_unverified_strategies_are_not_called_equivalent(tmp_path: Path) -> None:
    cells = [replace(cell, equivalent=None) for cell in _learning()]
    text = explanation_text(_only(compared(tmp_path, cells), "quality differs"))
    assert text.startswith("Strategies end with different quality: ")


@pytest.mark.parametrize("where", ["rank 1, position_ids", ""])
def test_no_batch_norm_is_not_blamed(tmp_path: Path, where: str) -> None:
    comparison = _verified(tmp_path, compared(tmp_path, _learning()), where)
    text = explanation_text(_only(comparison, "quality differs"))
    assert "BatchNorm" not in text
    assert "Nothing recorded explains it" in text


def test_quality_inside_the_noise_is_no_surprise(tmp_path: Path) -> None:
    comparison = compared(tmp_path, _learning(ddp=(0.90, 0.60, 0.78)))
    assert _none(comparison, "quality differs")


@pytest.mark.parametrize(
    "workload",
    [{"dataset": "digits", "validation_samples": 50}, {"dataset": "imagefolder"}],
    ids=["few samples", "an unknown number"],
)
def test_few_validation_samples_show_little(tmp_path: Path, workload: dict[str, Any]) -> None:
    """Ten points on 50 samples each are within what other samples would give."""
    comparison = compared(tmp_path, _learning())
    few = tuple(
        replace(
            row,
            trials=tuple(
                trial.model_copy(update={"trial": trial.trial | {"workload": workload}})
                for trial in row.trials
            ),
        )
        for row in comparison.rows
    )
    assert not _none(comparison, "quality differs")
    assert _none(replace(comparison, rows=few), "quality differs")


def _asynchronous(*qualities: float, stale: float = 0.9) -> list[Cell]:
    return [
        Cell(strategy="ddp", world_size=2, rates=(180.0,), qualities=(0.80, 0.81, 0.79)),
        Cell(
            strategy="ps-async",
            world_size=2,
            rates=(181.0,),
            qualities=qualities,
            equivalent=None,
            guarantee="every gradient is applied once",
            metrics={"staleness_mean": stale, "staleness_max": 3.0},
        ),
    ]


def test_stale_gradients_that_cost(tmp_path: Path) -> None:
    one = _only(compared(tmp_path, _asynchronous(0.50, 0.51, 0.49)), "gradients are stale")
    text = explanation_text(one)
    assert "top-1 of ps-async on 2 ranks 50.0 %, of ddp on 2 ranks 80.0 %" in text
    assert "Its gradients were 0.90 updates old on average, 3 at most" in text


def test_staleness_that_costs_nothing_is_not_blamed(tmp_path: Path) -> None:
    cells = _asynchronous(0.80, 0.81, 0.79)
    assert _none(compared(tmp_path / "equal", cells), "gradients are stale")
    cells = _asynchronous(0.50, 0.51, 0.49, stale=0.0)
    assert _none(compared(tmp_path / "fresh", cells), "gradients are stale")


def _waiting(*exposed: float) -> Cell:
    """Of steps of 100 ms, and a fourth of exposed communication per rank."""
    return Cell(
        strategy="ddp",
        world_size=len(exposed),
        rates=(640.0,),
        exposed_by_rank=exposed,
    )


def test_others_wait_for_a_slow_rank(tmp_path: Path) -> None:
    one = _only(compared(tmp_path, [_waiting(0.050, 0.010, 0.052)]), "a rank is waited for")
    assert one.facts["rank"] == 1
    assert one.difference == pytest.approx(0.041)
    assert explanation_text(one) == (
        "With ddp on 3 ranks the others wait for rank 1: in the profiled step, which is not timed,"
        " they communicate 41.0 ms longer than rank 1, 41 % of a timed step."
    )


def test_one_repeat_shows_no_slow_rank(tmp_path: Path) -> None:
    """Some rank is always the last one."""
    comparison = compared(tmp_path, [_waiting(0.050, 0.010, 0.052)], repeats=1)
    assert _none(comparison, "a rank is waited for")


def test_even_ranks_wait_for_nobody(tmp_path: Path) -> None:
    assert _none(compared(tmp_path, [_waiting(0.050, 0.048)]), "a rank is waited for")


def test_three_lines_at_most(tmp_path: Path) -> None:
    """The most striking of each kind; the rest is counted."""
    cells = [
        _memory("ddp", state=40, activations=100),
        *(
            _memory(strategy, state=30, activations=100 + 10 * extra)
            for extra, strategy in enumerate(("zero-1", "zero-2", "zero-3", "fsdp"), start=1)
        ),
    ]
    found = explain(compared(tmp_path, cells))
    assert len(found) == 4
    first, more = explanation_lines(found, lambda _: "")
    assert first.startswith("Sharding saves little: fsdp on 2 ranks needs 30.0 MiB")
    assert more == "3 more explanations and every part: compare --format json."
    assert explanation_lines(found, lambda _: "bf16")[0].startswith("bf16: Sharding saves little")
    stale = _only(
        compared(tmp_path / "stale", _asynchronous(0.50, 0.51, 0.49)), "gradients are stale"
    )
    waits = _only(compared(tmp_path / "waits", [_waiting(0.050, 0.010)]), "a rank is waited for")
    differs = _only(compared(tmp_path / "differs", _learning()), "quality differs")
    lines = explanation_lines([*found, stale, waits, differs], lambda _: "")
    assert len(lines) == 4
    assert [line.split()[0] for line in lines] == ["Sharding", "With", "Stale", "4"]
