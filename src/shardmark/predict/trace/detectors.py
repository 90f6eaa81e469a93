"""Traces detectors with as many positive proposals as they sample at most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def limited_heads(model: nn.Module) -> dict[str, Any]:
    """Return torchvision's region heads that compute masks or keypoints, by their names.

    These compute positive proposals alone.  Weights from the seed find almost none, trained ones
    about as many as are sampled at most.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "assign_targets_to_proposals")
        and (module.has_mask() or module.has_keypoint())
    }


@contextmanager
def at_their_limits(model: nn.Module) -> Iterator[None]:
    """Let region heads sample as many positive proposals as they may."""
    heads = limited_heads(model).values()
    for head in heads:
        head.assign_targets_to_proposals = partial(
            _assigned, head.assign_targets_to_proposals, head
        )
    try:
        yield
    finally:
        for head in heads:
            del head.assign_targets_to_proposals


def _assigned(
    original: Any,
    head: Any,
    proposals: Sequence[Tensor],
    boxes: Sequence[Tensor],
    labels: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Match the first proposals of each image to its first box."""
    indices, assigned = original(proposals, boxes, labels)
    sampler = head.fg_bg_sampler
    most = int(sampler.batch_size_per_image * sampler.positive_fraction)
    for index, label, of_picture in zip(indices, assigned, labels, strict=True):
        if len(of_picture):
            index[:most] = 0
            label[:most] = of_picture[0]
    return indices, assigned
