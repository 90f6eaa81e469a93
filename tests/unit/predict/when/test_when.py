"""The best strategy by ranges of an axis, measured or predicted: crossings and intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from shardmark.base.table.formats import Format, records
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.report.figures import figures_of
from shardmark.bench.report.views.registry import find_view
from shardmark.predict.plan import Plan, Prediction
from shardmark.predict.step import StepTime
from shardmark.predict.table import plan_json, render_plan
from shardmark.predict.when.crossings import BestRange, RangeLine
from shardmark.predict.when.view import (
    axis_value,
    measured_lines,
    planned_lines,
    planned_tables,
    when_tables,
)
from tests import present
from tests.golden.invented import compare_trials, invented_trial

AXIS = "recipe.global_batch"
Rates = Mapping[str, Mapping[int, Sequence[float]]]


def measured(rates: Rates, axis: str = AXIS) -> Comparison:
    return compare_trials(
        *(
            invented_trial(
                strategy,
                2,
                repeat,
                varied={axis: value},
                metrics={"samples_per_second": rate, "peak_memory_bytes": 1000.0 - value},
            )
            for strategy, by_value in rates.items()
            for value, by_repeat in by_value.items()
            for repeat, rate in enumerate(by_repeat)
        )
    )


def throughput(comparison: Comparison) -> RangeLine:
    return next(x for x in measured_lines(comparison.rows) if x.metric == "samples_per_second")


def varying(rate: float, spread: float = 0.01) -> list[float]:
    """Three repeats whose logarithms differ by the spread."""
    return [rate * math.exp(change * spread) for change in (-1, 0, 1)]


CROSSING: Rates = {
    "ddp": {4: [100.0] * 3, 16: [100.0] * 3, 64: [100.0] * 3},
    "fsdp": {4: varying(80.0), 16: varying(125.0), 64: varying(150.0)},
    "zero-1": {4: varying(70.0), 16: varying(90.0), 64: varying(75.0)},
}


def test_the_lead_changes_where_the_log_ratio_is_zero() -> None:
    """Ratios of 0.8 and 1.25 are equally far from 1: the crossing of 4 and 16 is at 8."""
    line = throughput(measured(CROSSING))
    ddp, fsdp, never = line.ranges
    assert (ddp.strategy, ddp.best_at, ddp.begins, ddp.shown) == ("ddp", (4,), None, True)
    assert ddp.ahead == pytest.approx((1.25, 1.25))
    assert (fsdp.strategy, fsdp.best_at, fsdp.rival) == ("fsdp", (16, 64), "ddp")
    assert fsdp.ahead == pytest.approx((1.25, 1.5))
    assert (never.strategy, never.best_at, never.rival) == ("zero-1", (), "fsdp")
    assert never.ahead == pytest.approx((0.5, 0.72))
    assert present(fsdp.begins).value == pytest.approx(8.0)


def test_the_interval_of_a_crossing_comes_from_those_of_the_ratios() -> None:
    begins = present(throughput(measured(CROSSING)).ranges[1].begins)
    assert begins.low is not None
    assert begins.high is not None
    # At the middle, the error of the log ratio is that of the mean of two independent ones.
    width = 4.30265 * 0.01 / math.sqrt(3) / math.sqrt(2)
    slope = 2 * math.log(1.25) / math.log(16 / 4)
    assert math.log(begins.high / 8) == pytest.approx(width / slope, rel=1e-4)
    assert begins.low * begins.high == pytest.approx(64)
    assert begins.low < 8 < begins.high


def test_noise_leaves_an_end_open_and_one_repeat_leaves_both() -> None:
    rates = {"ddp": {4: [100.0] * 3, 16: [100.0] * 3}}
    noisy = {**rates, "fsdp": {4: varying(97.0, 0.05), 16: varying(150.0)}}
    _, fsdp = throughput(measured(noisy)).ranges
    assert fsdp.begins is not None
    assert fsdp.begins.low is None
    assert fsdp.begins.high is not None
    once = {s: {v: r[1:2] for v, r in by.items()} for s, by in CROSSING.items()}
    begins = present(throughput(measured(once)).ranges[1].begins)
    assert begins.value == pytest.approx(8.0)
    assert (begins.low, begins.high) == (None, None)


def test_a_tie_does_not_end_a_lead() -> None:
    """At 16, fsdp has the better mean, which the repeats do not show."""
    rates = {
        "ddp": {4: varying(100), 16: varying(100), 64: varying(100)},
        "fsdp": {4: varying(80), 16: [90.0, 104.0, 110.0], 64: varying(80)},
    }
    (ddp, fsdp) = throughput(measured(rates)).ranges
    assert (ddp.best_at, ddp.shown, fsdp.best_at) == ((4, 16, 64), False, ())


def test_a_strategy_without_a_value_on_one_side_has_no_crossing() -> None:
    rates = {"ddp": {4: varying(100), 16: varying(100)}, "fsdp": {16: varying(90), 64: varying(80)}}
    comparison = measured(rates)
    _, fsdp = throughput(comparison).ranges
    assert (fsdp.best_at, fsdp.begins, fsdp.ahead) == ((64,), None, None)
    table = when_tables(comparison)[0]
    assert table.cells("begins") == ("-", "between 16 and 64")
    assert table.cells("ahead") == ("11 %", "alone")


def test_the_view_and_the_figure_have_the_crossing() -> None:
    comparison = measured(CROSSING)
    view, value = find_view("when")
    table, *_ = view.tables(comparison, value)
    assert table.title == "Throughput over global_batch"
    assert table.cells("best_at") == ("4", "16 to 64", "nowhere")
    assert table.cells("begins")[1].startswith("8 (7.58 to ")
    assert records(table)[1]["begins_value"] == pytest.approx(8.0)
    (figure,) = [f for f in figures_of(comparison) if f.name == "best-by-axis"]
    names = [series.name for series in figure.panels[0].series]
    assert names == ["ddp", "fsdp", "zero-1", "crossing"]
    assert figure.panels[0].series[-1].x == pytest.approx((8.0, 8.0))
    assert figure.panels[0].series[0].y == pytest.approx((100, 80, 100 / 1.5))


def test_nothing_to_compare_is_said() -> None:
    (table,) = when_tables(compare_trials(invented_trial()))
    assert "Vary, for example" in table.notes[0]


def test_the_size_of_the_model_is_a_metric_and_an_axis() -> None:
    trials = []
    for model, parameters in (("resnet18", 11_000_000), ("resnet50", 25_000_000)):
        for strategy, rate in (("ddp", 100.0), ("fsdp", 11e8 / parameters)):
            trial = invented_trial(
                strategy,
                varied={"workload.model": model},
                metrics={"samples_per_second": rate},
            )
            ranks = [
                rank.model_copy(
                    update={"probe": rank.probe.model_copy(update={"parameters": parameters})}
                )
                for rank in trial.ranks
                if rank.probe is not None
            ]
            trial.trial["workload"] = {"name": "classification", "model": model}
            trials.append(trial.model_copy(update={"ranks": tuple(ranks)}))
    comparison = compare_trials(*trials)
    sizes = {row.metrics["parameters"].value for row in comparison.rows}  # type: ignore[union-attr]
    assert sizes == {11_000_000, 25_000_000}
    line = throughput(comparison)
    assert (line.axis, line.values) == ("parameters", [11e6, 25e6])
    (best, *_) = line.ranges
    assert isinstance(best, BestRange)
    assert axis_value("parameters", 1.3e9) == "1.3 B"
    assert axis_value("recipe.global_batch", 2.0**20) == "1048576"


ERROR = 1.1
"""A step may take so many times as long as predicted."""


def predicted(strategy: str, seconds: float, ranks: int = 8, **fields: Any) -> Prediction:
    time = StepTime(
        compute_seconds=seconds,
        distribution_seconds=0,
        bubble_seconds=0,
        waiting_seconds=0,
        interference_seconds=0,
    )
    known: dict[str, Any] = {
        "strategy_options": {},
        "varied": {},
        "nodes": 1,
        "devices": ranks,
        "card_bytes": 80e9,
        "samples": 64,
        "tokens_per_sample": None,
        "device_bytes": 1e9,
        "card_fit": "yes",
        "time": time,
        "low_seconds": seconds / ERROR,
        "high_seconds": seconds * ERROR,
    }
    return Prediction(strategy=strategy, ranks=ranks, **(known | fields))


def sized(strategy: str, seconds: float, size: float, **fields: Any) -> Prediction:
    varied = {"workload.model": f"model-{size:.0e}"}
    return predicted(strategy, seconds, varied=varied, parameters=int(size), **fields)


def plan_of(*rows: Prediction) -> Plan:
    return Plan(experiment="made", on="8xh100", rows=rows, anchored=None)


SIZES = (
    *(sized("ddp", 1.0, size) for size in (1e8, 1e9, 1e10)),
    *(sized("fsdp", s, size) for s, size in ((1.25, 1e8), (1.25, 1e9), (0.8, 1e10))),
)


def test_the_lead_changes_where_the_interpolated_ratio_is_zero() -> None:
    """Ratios of 0.8 and 1.25 are equally far from 1, so the crossing is at the geometric mean."""
    (line,) = (x for x in planned_lines(SIZES) if x.metric == "samples_per_second")
    ddp, fsdp = line.ranges
    assert (line.axis, ddp.best_at, ddp.shown) == ("parameters", (1e8, 1e9), True)
    assert (fsdp.strategy, fsdp.best_at, fsdp.shown) == ("fsdp", (1e10,), True)
    assert fsdp.begins is not None
    assert fsdp.begins.value == pytest.approx(10**9.5)
    # The ratio rises by 1.25 squared over this decade, and may be wrong by 1.1 at both ends.
    factor = 10 ** (math.log(ERROR) / math.log(1.25**2))
    assert present(fsdp.begins.high) / fsdp.begins.value == pytest.approx(factor)
    assert fsdp.begins.value / present(fsdp.begins.low) == pytest.approx(factor)


def test_a_difference_within_the_error_decides_nothing() -> None:
    rows = [sized("ddp", 1.0, size) for size in (1e8, 1e9)]
    rows += [sized("fsdp", s, size) for s, size in ((1.2, 1e8), (0.95, 1e9))]
    line = planned_lines(rows)[0]
    ddp, fsdp = line.ranges
    assert ddp.best_at == (1e8, 1e9), "the lead of fsdp is smaller than the error"
    assert not ddp.shown
    assert fsdp.best_at == ()


def test_a_strategy_is_best_where_no_other_fits() -> None:
    rows = [*SIZES[:2], sized("ddp", 1.0, 1e10, card_fit="no"), *SIZES[3:5], sized("fsdp", 2, 1e10)]
    (table, *_) = planned_tables(plan_of(*rows))
    cells = dict(zip(table.values("strategy"), table.values("begins"), strict=True))
    assert cells["fsdp"] == "between 1 B and 10 B"
    assert table.title == "Planned throughput over parameters, on 8xh100"
    assert "Planned" in table.notes[0]


def test_ranks_are_an_axis_under_each_condition() -> None:
    rows = [
        predicted(strategy, seconds / ranks, ranks, varied={"recipe.precision": precision})
        for precision, factor in (("bf16", 1.0), ("fp32", 2.0))
        for strategy, seconds in (("ddp", factor), ("fsdp", 2 * factor))
        for ranks in (8, 16)
    ]
    lines = [x for x in planned_lines(rows) if x.metric == "samples_per_second"]
    assert [(x.axis, dict(x.conditions)) for x in lines] == [
        ("world_size", {"recipe.precision": "bf16"}),
        ("world_size", {"recipe.precision": "fp32"}),
    ]


def test_models_do_not_compete_in_the_answers() -> None:
    plan = plan_of(*SIZES)
    answers = [a for a in plan_json(plan)["answers"] if a["question"] == "fastest"]
    assert [answer["strategy"] for answer in answers] == ["ddp", "ddp", "fsdp"]
    assert answers[0]["task"] == {"workload.model": "model-1e+08"}
    text = render_plan(plan, Format.TEXT, 80)
    assert text.count("Fastest: ") == 3
    table = render_plan(plan, Format.TEXT, 80, when=True)
    assert "Planned throughput" in table
    assert "Fastest" not in table
