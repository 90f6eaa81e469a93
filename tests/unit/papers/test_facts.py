"""Sizes and qualities beside the studies: counted again, and as torchvision publishes them."""

from __future__ import annotations

import pytest

from shardmark.analysis.studies.facts import KnownDetector, KnownModel, facts

KNOWN = facts()
CLASSIFIERS = [one for one in KNOWN.models if not one.name.startswith("fasterrcnn")]


@pytest.mark.parametrize("known", CLASSIFIERS, ids=lambda known: known.name)
def test_parameters_are_those_of_the_built_model(known: KnownModel) -> None:
    import torch
    from torchvision.models import get_model

    with torch.device("meta"):
        model = get_model(known.name, weights=None, num_classes=known.classes)
    assert sum(one.numel() for one in model.parameters()) == known.parameters


@pytest.mark.parametrize("known", KNOWN.detectors, ids=lambda known: known.name)
def test_detectors_are_as_torchvision_publishes_them(known: KnownDetector) -> None:
    from torchvision.models import get_model_weights

    meta = get_model_weights(known.name)["COCO_V1"].meta
    assert meta["_metrics"]["COCO-val2017"]["box_map"] == pytest.approx(100 * known.map)
    counted = KNOWN.parameters(known.name, "coco")
    assert counted in (None, meta["num_params"])


def test_what_is_not_known_is_none() -> None:
    assert KNOWN.parameters("resnet18", "cifar10") == 11_181_642
    assert KNOWN.parameters("resnet18", "coco") is None
    assert KNOWN.parameters("resnet18", None) is None
    assert KNOWN.detector("fasterrcnn_resnet50_fpn", "imagenet") is None
    assert KNOWN.dataset("digits") is None


def test_data_sets_have_their_sizes() -> None:
    sizes = {one.name: one.training_samples for one in KNOWN.datasets}
    assert sizes == {"cifar10": 50_000, "mnist": 60_000, "coco": 118_287}
