"""Detectors are built by name, with the same weights everywhere, and train."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.workloads.detection_folder import options
from tests.unit.workloads.test_models import weights_hash
from torch import nn

from shardmark.core.errors import InputError
from shardmark.workloads.detection.building import build_detector
from shardmark.workloads.detection.options import DETECTORS
from shardmark.workloads.detection.own_detectors import fasterrcnn_swin_t_fpn, fcos_resnet18_fpn
from shardmark.workloads.detection.proposals import sample_by_picture

CLASSES = ("gizmo", "dog", "person")
SMALLER: dict[str, dict[str, Any]] = {
    # Heads of convolutions and masks are slow: fewer boxes are passed through them.
    "fasterrcnn": {"box_detections_per_img": 5, "box_batch_size_per_image": 16},
    "maskrcnn": {"box_detections_per_img": 3, "box_batch_size_per_image": 16},
}


def build(name: str, seed: int = 0, **fields: Any) -> nn.Module:
    return build_detector(
        options(Path("nowhere"), model=name, **fields), classes=CLASSES, seed=seed
    )


def smaller(name: str) -> dict[str, Any]:
    chosen = SMALLER.get(name.partition("_")[0], {})
    few = {"rpn_pre_nms_top_n_test": 20, "rpn_post_nms_top_n_test": 8}
    return chosen | few if chosen else {}


@pytest.mark.parametrize("name", DETECTORS)
def test_detector_trains_and_detects(name: str) -> None:
    model = build(name, model_options=smaller(name))
    assert model.training
    sample_by_picture(model)
    pictures = [torch.rand(3, 40, 56), torch.rand(3, 48, 32)]
    boxes = torch.tensor([[4.0, 4.0, 30.0, 30.0], [10.0, 5.0, 20.0, 28.0]])
    targets = [
        {"boxes": boxes, "labels": torch.tensor([1, 3]), "masks": torch.ones(2, 40, 56)},
        {"boxes": boxes[:0], "labels": torch.empty(0).long(), "masks": torch.ones(0, 48, 32)},
    ]
    for seed, target in enumerate(targets):
        target["sampling_seed"] = seed  # type: ignore[assignment]
    with torch.no_grad():
        losses = model(pictures, targets)
        found = model.eval()(pictures)
    assert losses
    assert all(loss.isfinite() and loss.shape == () for loss in losses.values())
    assert len(found) == 2
    for picture, detections in zip(pictures, found, strict=True):
        assert detections["labels"].numel() == 0 or detections["labels"].max() <= len(CLASSES)
        if name.startswith("maskrcnn"):
            shape = (len(detections["boxes"]), 1, *picture.shape[1:])
            assert detections["masks"].shape == shape


@pytest.mark.parametrize("name", DETECTORS)
def test_listed_numbers_of_parameters_are_true(name: str) -> None:
    """With COCO's 91 outputs, as torchvision's own tables count them."""
    classes = [str(number) for number in range(90)]
    with torch.device("meta"):
        model = build_detector(options(Path("nowhere"), model=name), classes=classes, seed=0)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    listed = re.search(r"([\d.]+) M parameters", DETECTORS[name])
    if listed is None:
        assert name == "fasterrcnn_mobilenet_v3_large_320_fpn", "the same as the line above"
    else:
        assert f"{millions:.1f}" == listed[1]


@pytest.mark.parametrize("name", ["fasterrcnn_mobilenet_v3_large_fpn", "fcos_resnet18_fpn"])
def test_weights_come_from_the_seed_alone(name: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = weights_hash(build(name, seed=1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert weights_hash(build(name, seed=1)) == first
    assert weights_hash(build(name, seed=2)) != first


def test_sizes_of_the_pictures() -> None:
    name = "fasterrcnn_mobilenet_v3_large_320_fpn"
    assert sizes(name, 48, 96) == ((48,), 96)
    assert sizes(name, None, None) == ((320,), 640), "its own"
    assert sizes("fcos_resnet18_fpn", None, None) == ((128,), 256)
    assert sizes("fcos_resnet18_fpn", None, 99) == ((128,), 99)


def sizes(name: str, smallest: int | None, largest: int | None) -> tuple[tuple[int, ...], int]:
    with torch.device("meta"):
        resizing: Any = build(name, min_size=smallest, max_size=largest).transform
    return resizing.min_size, resizing.max_size


def test_all_layers_train_without_trained_weights() -> None:
    for name in ("fasterrcnn_resnet50_fpn", "fasterrcnn_swin_t_fpn", "fcos_resnet18_fpn"):
        with torch.device("meta"):
            model = build(name)
        assert all(parameter.requires_grad for parameter in model.parameters()), name
        frozen = [type(m).__name__ for m in model.modules() if "Frozen" in type(m).__name__]
        assert not frozen, "batch norms learn, too"


@pytest.mark.parametrize(
    ("layers", "frozen"),
    [
        (None, set()),
        (5, set()),
        (4, {0}),
        (3, {0, 1}),
        (2, {0, 1, 2, 3}),
        (1, {0, 1, 2, 3, 4, 5}),
        (0, {0, 1, 2, 3, 4, 5, 6, 7}),
    ],
)
def test_frozen_layers_of_swin(layers: int | None, frozen: set[int]) -> None:
    """0 is the embedding; 1, 3, 5, 7 are the stages; the merging before a stage is part of it."""
    with torch.device("meta"):
        model = fasterrcnn_swin_t_fpn(num_classes=3, trainable_backbone_layers=layers)
    body: Any = model.backbone.body
    found = {
        place
        for place, part in enumerate(body)
        if not any(parameter.requires_grad for parameter in part.parameters())
    }
    assert found == frozen
    still = [place for place in range(8) if place not in frozen]
    assert all(p.requires_grad for place in still for p in body[place].parameters())
    rest = [p for name, p in model.named_parameters() if not name.startswith("backbone.body")]
    assert all(parameter.requires_grad for parameter in rest)


def test_more_layers_of_swin_than_there_are() -> None:
    with pytest.raises(ValueError, match="trainable_backbone_layers is 6; 5 at most"):
        fasterrcnn_swin_t_fpn(num_classes=3, trainable_backbone_layers=6)


@pytest.mark.parametrize(
    ("name", "key", "nearest"),
    [
        ("fcos_resnet18_fpn", "nms_tresh", "nms_thresh"),
        ("retinanet_resnet50_fpn", "detection_per_img", "detections_per_img"),
        ("maskrcnn_resnet50_fpn", "box_scor_thresh", "box_score_thresh"),
        ("fasterrcnn_swin_t_fpn", "rpn", "rpn_"),
        ("fasterrcnn_mobilenet_v3_large_fpn", "wholly_unlike", "box_batch_size_per_image"),
    ],
)
def test_unknown_model_options(name: str, key: str, nearest: str) -> None:
    """torchvision's classes swallow them."""
    with torch.device("meta"), pytest.raises(InputError) as caught:
        build(name, model_options={key: 1})
    assert str(caught.value).startswith(f"workload.model_options.{key}: {name} takes no such")
    assert nearest in str(caught.value)


@pytest.mark.parametrize("name", DETECTORS)
def test_model_options_reach_the_model(name: str) -> None:
    one_stage = name.startswith(("retinanet", "fcos"))
    key = "detections_per_img" if one_stage else "box_detections_per_img"
    with torch.device("meta"):
        model: Any = build(name, model_options={key: 7})
    assert (model if one_stage else model.roi_heads).detections_per_img == 7


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("fasterrcnn_swin_t_fpn", {"box_predictor": nn.Identity()}, "num_classes should be None"),
        ("retinanet_resnet50_fpn", {"backbone": 1}, "multiple values for argument 'backbone'"),
    ],
)
def test_wrong_model_options(name: str, given: dict[str, Any], message: str) -> None:
    with torch.device("meta"), pytest.raises(InputError, match=message) as caught:
        build(name, model_options=given)
    assert str(caught.value).startswith("workload.model_options: ")
    assert f"{name} cannot be built with " in str(caught.value)


def test_small_detector_can_be_narrower() -> None:
    narrow = fcos_resnet18_fpn(num_classes=11, backbone_width=32)
    assert round(sum(p.numel() for p in narrow.parameters()) / 1e6, 1) == 3.1
    target = {"boxes": torch.tensor([[10.0, 10.0, 40.0, 50.0]]), "labels": torch.tensor([3])}
    losses = narrow([torch.rand(3, 64, 64)], [target])
    assert all(loss.isfinite() for loss in losses.values())


def test_small_detector_freezes_as_torchvision_counts() -> None:
    model = fcos_resnet18_fpn(num_classes=3, trainable_backbone_layers=2)
    trained = {name for name, p in model.backbone.body.named_parameters() if p.requires_grad}
    assert {name.partition(".")[0] for name in trained} == {"layer3", "layer4"}
    with pytest.raises(ValueError, match="5 at most"):
        fcos_resnet18_fpn(num_classes=3, trainable_backbone_layers=6)
