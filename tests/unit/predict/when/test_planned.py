"""The predicted best strategy by ranges of an axis."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shardmark.base.table.formats import Format
from shardmark.predict.plan import Plan, Prediction
from shardmark.predict.step import StepTime
from shardmark.predict.table import plan_json, render_plan
from shardmark.predict.when.planned import planned_lines
from shardmark.predict.when.view import planned_tables
from tests import present

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
