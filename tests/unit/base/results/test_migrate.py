"""Results of versions that restarted ranks inside a trial still load."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardmark.base.results.migrate import without_restarts
from shardmark.base.results.schema import Outcome, TrialResult
from tests import present
from tests.golden.invented import invented_trial

RESTART = {"restart": 1, "at_seconds": 9.0, "reason": "rank 1 was ended by SIGKILL"}
RESUME = {"restart": 1, "step": 3, "at_seconds": 9.5, "lost_seconds": 2.0}


def stored(**of_rank_1: Any) -> dict[str, Any]:
    """A trial as an earlier version stored it."""
    trial: dict[str, Any] = json.loads(invented_trial("ddp", 2).model_dump_json())
    trial["restarts"] = [RESTART]
    trial["metrics"]["restarts"] = {"value": 1.0, "over": "trial"}
    trial["metrics"]["checkpoint_seconds"] = None
    trial["missing"]["checkpoint_seconds"] = "no checkpoint was written"
    for rank in trial["ranks"]:
        rank |= {"lost": None, "checkpoints": [], "resumes": [RESUME]}
    trial["ranks"][1] |= of_rank_1
    return trial


def test_a_restarted_trial_loads_without_its_restarts() -> None:
    exchange = {"pushes": 3, "lost_samples": 0}
    loaded = TrialResult.model_validate_json(json.dumps(stored(exchange=exchange)))
    assert loaded.outcome is Outcome.OK
    assert not {"restarts", "checkpoint_seconds"} & (loaded.metrics.keys() | loaded.missing.keys())
    assert present(loaded.ranks[1].exchange).pushes == 3


def test_a_trial_that_went_on_without_a_worker_is_failed_and_has_no_metrics() -> None:
    finding = {"kind": "slow steps", "text": "3 slow steps", "severity": 1.0}
    earlier = stored(lost="was ended by SIGKILL") | {"stability": [finding]}
    assert earlier["metrics"]["samples_per_second"]
    loaded = TrialResult.model_validate(earlier)
    assert (loaded.metrics, loaded.missing, loaded.stability) == ({}, {}, ())
    assert loaded.outcome is Outcome.FAILED
    assert present(loaded.failure).reason == "a worker was ended by SIGKILL"


@pytest.mark.parametrize("value", [None, [], 3, {"ranks": [3], "metrics": []}])
def test_content_that_is_no_trial_is_left_to_the_schema(value: object) -> None:
    assert without_restarts(value) == value
