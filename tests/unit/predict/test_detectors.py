"""Region heads of detectors sample as many positive proposals as they may while they are traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import RoIHeads

from shardmark.predict.trace.detectors import at_their_limits, limited_heads

PROPOSALS, MOST = 40, 5


def detector(*, masks: bool) -> nn.Module:
    other: dict[str, Any] = dict.fromkeys(("mask_roi_pool", "mask_head", "mask_predictor"))
    if masks:
        other = {name: nn.Identity() for name in other}
    heads = RoIHeads(
        *(nn.Identity(), nn.Identity(), nn.Identity()),
        *(0.5, 0.5, 20, MOST / 20, None, 0.05, 0.5, 100),
        **other,
    )
    return nn.ModuleDict({"roi_heads": heads})


def sampled(model: nn.Module, boxes: Tensor) -> Tensor:
    """Labels of the proposals that are sampled, which touch no box."""
    proposals = torch.tensor([[200.0, 200.0, 210.0, 210.0]]).repeat(PROPOSALS, 1)
    labels, masks = torch.full((len(boxes),), 3), torch.zeros(len(boxes), 50, 50)
    target = {"boxes": boxes, "labels": labels, "masks": masks}
    heads: Any = model["roi_heads"]  # type: ignore[index]
    found: Tensor = heads.select_training_samples([proposals], [target])[2][0]
    return found


ONE_BOX = torch.tensor([[0.0, 0.0, 50.0, 50.0]])


@pytest.mark.parametrize(
    ("masks", "boxes", "positive"),
    [(True, ONE_BOX, MOST), (False, ONE_BOX, 1), (True, torch.zeros(0, 4), 0)],
)
def test_only_heads_with_masks_are_filled(masks: bool, boxes: Tensor, positive: int) -> None:
    model = detector(masks=masks)
    assert list(limited_heads(model)) == (["roi_heads"] if masks else [])
    with at_their_limits(model):
        assert int((sampled(model, boxes) == 3).sum()) == positive
    assert int((sampled(model, boxes) == 3).sum()) == len(boxes)  # the box itself is a proposal
