"""Published quality and orders: with words that their tables contradict, and bear out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from shardmark.analysis.against import Against
from shardmark.papers import load_paper
from tests.unit.papers.studies import check, figure, finding, study

DETECTOR = {
    "workload.model": "fasterrcnn_resnet50_fpn",
    "workload.dataset": "coco",
    "workload.weights": "coco",
}


@pytest.mark.parametrize(
    ("value", "conditions", "contradicts"),
    [(0.14, DETECTOR, True), (0.19, DETECTOR, False), (0.36, DETECTOR, False)],
)
def test_trained_weights_keep_half_of_their_quality(
    value: float, conditions: dict[str, str], contradicts: bool
) -> None:
    against = study([figure("ddp", 2, metrics={"map": value})], conditions=conditions)
    found = finding(against, "quality of trained weights")
    assert (found is not None) is contradicts
    if found is not None:
        assert found.limit == 0.37
        assert "torchvision" in found.basis


def test_only_weights_of_the_same_data_set_are_a_reference() -> None:
    for weights in (None, "imagenet"):
        conditions = {**DETECTOR, "workload.weights": weights}
        against = study([figure("ddp", 2, metrics={"map": 0.1})], conditions=conditions)
        assert check(against, "quality of trained weights").figure_count == 0


def test_the_best_epoch_of_the_detection_study_decides() -> None:
    against = Against(paper=load_paper("lamsal-2025"), pairs=())
    found = finding(against, "quality of trained weights")
    assert found is not None
    assert (found.published, found.limit) == (0.1517, 0.37)


def orders(order: str, seconds: Mapping[str, float]) -> Against:
    figures = [figure(name, 2, metrics={"epoch_seconds": value}) for name, value in seconds.items()]
    statement = {"about": "epoch_seconds", "strategy": "ddp", "text": order, "order": order}
    return study(figures, [statement], rounding={"epoch_seconds": 1})


@pytest.mark.parametrize(
    ("order", "ddp", "contradicts"),
    [
        ("lowest", 9.0, False),
        ("lowest", 10.5, False),
        ("lowest", 12.0, True),
        ("second lowest", 15.0, False),
        ("second lowest", 8.0, True),
        ("second lowest", 25.0, True),
        ("highest", 25.0, False),
        ("highest", 15.0, True),
    ],
)
def test_orders_are_those_of_the_table(order: str, ddp: float, contradicts: bool) -> None:
    """The others take 10 and 20 seconds; a second of difference may be rounding."""
    against = orders(order, {"ddp": ddp, "fsdp": 10.0, "zero-1": 20.0})
    found = finding(against, "order that the words claim")
    assert (found is not None) is contradicts
    if found is not None:
        assert found.check.contradicted(found.published, found.limit, found.side)


def leads(first: Sequence[float], second: Sequence[float]) -> Against:
    def table(values: Sequence[float]) -> dict[str, object]:
        rows = [[number, value] for number, value in enumerate(values, start=1)]
        return {"columns": ["epoch", "map"], "rows": rows}

    figures = [figure("ddp", 2, epochs=table(first)), figure("fsdp", 2, epochs=table(second))]
    statement = {"about": "map", "strategy": "ddp", "text": "best", "order": "highest"}
    return study(figures, [statement])


def test_a_lead_within_the_scatter_shows_no_order() -> None:
    scattered = leads([0.1, 0.30, 0.34, 0.33], [0.1, 0.31, 0.30, 0.32])
    found = finding(scattered, "lead within the scatter")
    assert found is not None
    assert [found.published, found.limit] == pytest.approx([0.01, 0.04])
    clear = leads([0.1, 0.50, 0.51, 0.50], [0.3, 0.30, 0.31, 0.30])
    assert finding(clear, "lead within the scatter") is None
    short = leads([0.3, 0.4], [0.3, 0.39])
    assert check(short, "lead within the scatter").figure_count == 0
