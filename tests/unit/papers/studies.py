"""Invented studies for the checks of plausibility."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardmark.analysis.studies.against import Against
from shardmark.analysis.studies.plausibility import Examined, Finding, plausibility_of
from shardmark.analysis.studies.schema import Paper

CLASSIFIER = {"workload.model": "resnet18", "workload.dataset": "cifar10"}


def figure(strategy: str, ranks: int, **fields: Any) -> dict[str, Any]:
    return {"strategy": strategy, "world_size": ranks, "place": "table 1", **fields}


def study(
    figures: Sequence[Mapping[str, Any]] = (),
    statements: Sequence[Mapping[str, Any]] = (),
    **fields: Any,
) -> Against:
    """A study beside which nothing was measured."""
    content: dict[str, Any] = {
        "name": "some",
        "title": "Some study",
        "authors": ["A. Author"],
        "year": 2025,
        "kind": "report",
        "compares": "something",
        "conditions": CLASSIFIER,
        "batch": None,
        "hardware": [{"name": "one", "device": None, "device_count": 2}],
        "reference": "single",
        "figures": figures,
        "statements": [{"place": "section 1", **one} for one in statements],
    }
    return Against(paper=Paper.model_validate(content | fields), pairs=())


def check(against: Against, name: str) -> Examined:
    (found,) = (one for one in plausibility_of(against) if one.check.name == name)
    return found


def finding(against: Against, name: str) -> Finding | None:
    """Of a check that is applied to at least one figure."""
    found = check(against, name)
    assert found.figure_count
    (one,) = found.findings or (None,)
    return one


def peaks(single: float, fsdp: float, **conditions: Any) -> Against:
    return study(
        [
            figure("single", 1, metrics={"peak_memory_bytes": single}),
            figure("fsdp", 2, metrics={"peak_memory_bytes": fsdp}),
        ],
        conditions={**CLASSIFIER, **conditions},
    )
