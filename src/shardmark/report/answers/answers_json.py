"""The answer to one question for programs."""

from __future__ import annotations

from shardmark.analysis.advise.recommendation import Recommendation
from shardmark.analysis.compare.quality_in_time import QualityInTime
from shardmark.report.answers.wording import interval_json, row_json


def answer_json(one: Recommendation) -> dict[str, object]:
    """What was asked, what was found, and every number that it rests on, in base units."""
    found = one.selection
    return {
        "goal": one.goal,
        "experiment": one.field.experiment,
        "workload": one.field.workload,
        "precision": one.field.precision,
        "varied": dict(one.field.varied),
        "world_size": one.world_size,
        "metric": one.metric,
        "quality": one.quality,
        "target": one.target,
        "target_is_chance": one.target_is_chance,
        "ended_below_target": [row_json(row) for row in one.ended_below],
        "quality_in_time": None if one.in_time is None else _in_time_json(one.in_time),
        "unverified": one.field.unverified,
        "state": None if found is None else found.state,
        "reason": one.reason,
        "best": None if found is None else row_json(found.best),
        "second": None if found is None or found.second is None else row_json(found.second),
        "margin": None if found is None else interval_json(found.margin),
        "no_measurable_difference": [] if found is None else [row_json(r) for r in found.ties],
        "too_few_repeats": []
        if found is None
        else [row_json(row) for row in found.without_interval],
        "values": []
        if found is None
        else [{"row": row_json(row), "value": value} for row, value in found.values],
        "promises_less": [
            {
                "row": row_json(weaker.row),
                "guarantee": weaker.row.guarantee,
                "value": weaker.value,
                "advantage": interval_json(weaker.advantage),
                "shown_better": weaker.shown_better,
                "quality": interval_json(weaker.quality),
            }
            for weaker in one.weaker
        ],
    }


def _in_time_json(found: QualityInTime) -> dict[str, object]:
    like = found.within_sampling
    return {
        "fastest": row_json(found.fastest),
        "seconds": found.seconds,
        "metric": found.metric,
        "is_chance": found.is_chance,
        "values": [{"row": row_json(row), "value": value} for row, value in found.values],
        "too_early": [row_json(row) for row in found.too_early],
        "within_sampling_error_of_first": None if like is None else [row_json(row) for row in like],
    }
