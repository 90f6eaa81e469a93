"""Why something is slower: each recorded cause with its amount, and nothing invented."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.diagnose.explanations import explain
from shardmark.analysis.diagnose.surprise import Explanation, Kind
from shardmark.report.answers.explanations import explanation_json, explanation_text
from tests.unit.recommendation.invented_rows import BATCH, Cell, compared, steps

TWO = {"data": 0.010, "forward": 0.060, "backward": 0.120, "optimizer": 0.010}
"""Spans of two ranks' steps in seconds: 200 ms."""


def _cell(
    world_size: int,
    spans: Mapping[str, float],
    *,
    exposed: float | None = 0.0,
    strategy: str = "ddp",
    step_seconds: float | None = None,
    cpu_percent: float | None = None,
    rates: tuple[float, ...] | None = None,
    servers: int = 0,
) -> Cell:
    """A cell whose steps hold those spans; `step_seconds` where they hold more."""
    step = sum(spans.values()) if step_seconds is None else step_seconds
    metrics: dict[str, float | None] = dict(steps(**spans))
    metrics |= {
        "step_seconds": step,
        "exposed_communication_seconds": exposed,
        "cpu_percent": cpu_percent,
    }
    return Cell(
        strategy=strategy,
        world_size=world_size,
        rates=rates or (BATCH / step,),
        metrics=metrics,
        servers=servers,
    )


def _only(comparison: Comparison, kind: Kind) -> Explanation:
    (found,) = [one for one in explain(comparison) if one.kind == kind]
    return found


def _amounts(one: Explanation) -> dict[str, float]:
    return {part.name: part.amount for part in one.parts}


def _four(tmp_path: Path, four: Cell, *, cores: float | None = None) -> Explanation:
    two = _cell(2, TWO, exposed=0.020, cpu_percent=90.0)
    return _only(compared(tmp_path, [two, four], cores=cores), "more ranks are slower")


@pytest.mark.parametrize(
    ("grown", "exposed", "cause"),
    [
        ("backward", 0.120, "exposed communication"),
        ("data", 0.020, "waiting for data"),
        ("optimizer", 0.020, "the optimizer"),
        ("forward", 0.020, "computation"),
    ],
)
def test_each_cause_is_found(tmp_path: Path, grown: str, exposed: float, cause: str) -> None:
    """Four ranks take 100 ms more, all of it in one place."""
    spans = TWO | {grown: TWO[grown] + 0.100}
    one = _four(tmp_path, _cell(4, spans, exposed=exposed))
    assert one.difference == pytest.approx(0.100)
    assert _amounts(one)[cause] == pytest.approx(0.100)
    assert sum(abs(part.amount) for part in one.parts) == pytest.approx(0.100)
    assert one.unexplained == pytest.approx(0, abs=1e-9)
    assert f"The same by span: {cause} +100 ms" in explanation_text(one)


def test_exposed_communication_is_said_to_be_from_an_untimed_step(tmp_path: Path) -> None:
    one = _four(tmp_path, _cell(4, TWO | {"backward": 0.220}, exposed=0.120))
    assert "exposed communication +100 ms (in a profiled, untimed step)" in explanation_text(one)


def test_exposed_communication_is_not_counted_twice(tmp_path: Path) -> None:
    """It lies in the backward span: the parts still add up to the extra time."""
    spans = TWO | {"backward": 0.170, "optimizer": 0.040, "forward": 0.080}
    one = _four(tmp_path, _cell(4, spans, exposed=0.060))
    amounts = _amounts(one)
    assert one.difference == pytest.approx(0.100)
    assert amounts["exposed communication"] == pytest.approx(0.040)
    assert amounts["computation"] == pytest.approx(0.060)
    assert amounts["the optimizer"] == 0, "its 30 ms may be the communication"
    assert sum(amounts.values()) == pytest.approx(0.100)


def test_exposed_communication_fits_into_its_spans(tmp_path: Path) -> None:
    """The profiler slows its step: more communication than step cannot be."""
    spans = TWO | {"backward": 0.220}
    one = _four(tmp_path, _cell(4, spans, exposed=5.0))
    assert _amounts(one)["exposed communication"] == pytest.approx(0.290 - 0.020)
    assert _amounts(one)["computation"] == pytest.approx(0.100 - 0.270)


def test_time_outside_every_span_stays_unexplained(tmp_path: Path) -> None:
    one = _four(tmp_path, _cell(4, TWO, exposed=0.020, step_seconds=0.300))
    assert one.unexplained == pytest.approx(0.100)
    assert "by span: none holds it; 100 ms unexplained" in explanation_text(one)


def test_slow_steps_beyond_the_median_are_named(tmp_path: Path) -> None:
    """The median step is the two ranks'; the rate says that others were slower."""
    one = _four(tmp_path, _cell(4, TWO, exposed=0.020, rates=(BATCH / 0.3,)))
    assert _amounts(one)["steps slower than the median"] == pytest.approx(0.100)


def test_without_the_probe_communication_stays_in_its_spans(tmp_path: Path) -> None:
    one = _four(tmp_path, _cell(4, TWO | {"backward": 0.220}, exposed=None))
    assert "exposed communication" not in _amounts(one)
    assert _amounts(one)["computation"] == pytest.approx(0.100)


def test_four_ranks_on_two_cores(tmp_path: Path) -> None:
    """Four ranks of half a core each: 320 ms of CPU time a step need 160 ms on two cores.

    A core for each would need 80 ms: sharing costs up to 80 of the 100 ms.
    """
    spans = TWO | {"backward": 0.220}
    cell = _cell(4, spans, exposed=0.120, cpu_percent=100 * 0.320 / 4 / 0.300)
    one = _four(tmp_path, cell, cores=2)
    assert one.facts["busy_seconds"] == pytest.approx(0.320)
    assert one.facts["other_busy_seconds"] == pytest.approx(0.360)
    assert one.facts["floor_seconds"] == pytest.approx(0.160)
    assert one.facts["sharing_seconds"] == pytest.approx(0.080)
    text = explanation_text(one)
    assert text == (
        "More ranks are slower: ddp on 4 ranks is 33 % slower than on 2 ranks: 100 ms more for 64"
        " samples, of which up to 80.0 ms is the lack of cores (4 threads on 2 cores). The same by"
        " span: exposed communication +100 ms (in a profiled, untimed step)."
    )


def test_sharing_never_explains_more_than_there_is(tmp_path: Path) -> None:
    spans = TWO | {"backward": 0.220}
    cell = _cell(4, spans, exposed=0.120, cpu_percent=50.0)
    one = _four(tmp_path, cell, cores=1)
    assert one.facts["sharing_seconds"] <= one.difference


def test_enough_cores_are_not_blamed(tmp_path: Path) -> None:
    spans = TWO | {"backward": 0.220}
    cell = _cell(4, spans, exposed=0.120, cpu_percent=60.0)
    one = _four(tmp_path, cell, cores=16)
    assert "sharing_seconds" not in one.facts
    assert "share" not in explanation_text(one)


def test_unknown_cores_are_not_guessed(tmp_path: Path) -> None:
    spans = TWO | {"backward": 0.220}
    one = _four(tmp_path, _cell(4, spans, exposed=0.120, cpu_percent=60.0))
    assert "cores" not in one.facts


def test_servers_use_cores_as_well(tmp_path: Path) -> None:
    spans = TWO | {"backward": 0.220}
    one = _four(tmp_path, _cell(4, spans, cpu_percent=40.0, servers=1), cores=2)
    assert one.facts["processes"] == 5
    assert one.facts["busy_seconds"] == pytest.approx(0.40 * 5 * 0.300)


def test_one_rank_that_had_all_cores(tmp_path: Path) -> None:
    """`single` with two threads against two ranks of one thread: no core is won."""
    single = replace(_cell(1, TWO, strategy="single", cpu_percent=180.0), threads=2)
    ddp = _cell(2, TWO | {"backward": 0.220}, exposed=0.080, cpu_percent=80.0)
    one = _only(compared(tmp_path, [single, ddp], cores=2), "slower than single")
    text = explanation_text(one)
    assert text.startswith("ddp on 2 ranks is 33 % slower than single on 1 rank: 100 ms more for")
    assert ", of which 60.0 ms is more CPU work on 2 cores. " in text
    assert one.facts["work_seconds"] == pytest.approx((0.80 * 2 * 0.300 - 1.80 * 0.200) / 2)


def test_small_or_uncertain_differences_are_no_surprise(tmp_path: Path) -> None:
    two = _cell(2, TWO)
    slightly = _cell(4, TWO | {"backward": 0.124})
    assert explain(compared(tmp_path / "a", [two, slightly])) == ()
    noisy = _cell(4, TWO | {"backward": 0.220}, rates=(100.0, 300.0, 250.0))
    assert explain(compared(tmp_path / "b", [two, noisy])) == ()


def test_one_repeat_is_explained_and_doubted(tmp_path: Path) -> None:
    cells = [_cell(2, TWO), _cell(4, TWO | {"backward": 0.220})]
    one = _only(compared(tmp_path, cells, repeats=1), "more ranks are slower")
    assert not one.shown
    assert "(one repeat: not shown to be real)" in explanation_text(one)


def test_slower_strategy_on_as_many_ranks(tmp_path: Path) -> None:
    fsdp = _cell(2, TWO | {"forward": 0.160}, exposed=0.100, strategy="fsdp", cpu_percent=80.0)
    ddp = _cell(2, TWO, exposed=0.020, cpu_percent=90.0)
    one = _only(compared(tmp_path, [ddp, fsdp], cores=2), "strategy is slower")
    assert explanation_text(one) == (
        "On 2 ranks fsdp is 33 % slower than ddp: 100 ms more for 64 samples, of which 60.0 ms is"
        " more CPU work on 2 cores. The same by span: exposed communication +80.0 ms (in a"
        " profiled, untimed step) and computation +20.0 ms."
    )
    assert len(explanation_text(one).split()) <= 50


def test_a_small_share_of_the_cores_is_no_cause(tmp_path: Path) -> None:
    """20 ms more CPU work on two cores are 10 of 100 ms."""
    fsdp = _cell(2, TWO | {"forward": 0.160}, strategy="fsdp", cpu_percent=100 * 0.380 / 0.6)
    ddp = _cell(2, TWO, cpu_percent=90.0)
    one = _only(compared(tmp_path, [ddp, fsdp], cores=2), "strategy is slower")
    assert one.facts["work_seconds"] == pytest.approx(0.010)
    assert "CPU work" not in explanation_text(one)


def test_what_promises_less_is_no_yardstick(tmp_path: Path) -> None:
    """`fsdp` is held against `ddp`, though the asynchronous row is faster than both."""
    fsdp = _cell(2, TWO | {"forward": 0.160}, strategy="fsdp")
    asynchronous = replace(
        _cell(2, TWO | {"backward": 0.040}, strategy="ps-async"), equivalent=None, guarantee="less"
    )
    comparison = compared(tmp_path, [_cell(2, TWO), fsdp, asynchronous])
    one = _only(comparison, "strategy is slower")
    assert one.other is not None
    assert (one.row.strategy, one.other.strategy) == ("fsdp", "ddp")


def test_nothing_recorded_explains_nothing(tmp_path: Path) -> None:
    """A rate without spans: the surprise is told, and that nothing explains it."""
    bare = dict.fromkeys(
        ("step_seconds", "data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds")
    )
    cells = [
        Cell(strategy="ddp", world_size=size, rates=(rate,), metrics=bare)
        for size, rate in ((2, 300.0), (4, 200.0))
    ]
    one = _only(compared(tmp_path, cells), "more ranks are slower")
    assert one.parts == ()
    assert explanation_text(one) == (
        "More ranks are slower: ddp on 4 ranks is 33 % slower than on 2 ranks; its parts were not"
        " recorded, so that nothing explains it."
    )


def test_json_holds_what_the_text_says(tmp_path: Path) -> None:
    one = _four(tmp_path, _cell(4, TWO | {"data": 0.110}, exposed=0.020))
    document = explanation_json(one)
    assert document["difference"] == pytest.approx(0.100)
    assert document["kind"] == "more ranks are slower"
    assert document["text"] == explanation_text(one)
