"""Published quality: below what the weights had that a training began from, and above it."""

from __future__ import annotations

import pytest

from shardmark.analysis.studies import load_paper
from shardmark.analysis.studies.against import Against
from tests.unit.papers.studies import check, figure, finding, study

DETECTOR = {
    "workload.model": "fasterrcnn_resnet50_fpn",
    "workload.dataset": "coco",
    "workload.weights": "coco",
}


@pytest.mark.parametrize(
    ("value", "conditions", "contradicts"),
    [
        (0.14, DETECTOR, True),
        (0.184, DETECTOR, True),
        (0.186, DETECTOR, False),
        (0.36, DETECTOR, False),
    ],
)
def test_trained_weights_keep_half_of_their_quality(
    value: float, conditions: dict[str, str], contradicts: bool
) -> None:
    against = study([figure("ddp", 2, metrics={"map": value})], conditions=conditions)
    found = finding(against, "quality of trained weights")
    assert (found is not None) is contradicts
    if found is not None:
        assert (found.limit, found.check.margin) == (0.185, 0.0)
        assert found.basis.startswith("0.5 x 0.370, that of fasterrcnn_resnet50_fpn")
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
    assert (found.published, found.limit) == (0.1517, 0.185)
