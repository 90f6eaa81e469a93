"""Random sampling of proposals that is the same under every strategy."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

SAMPLER = "fg_bg_sampler"
"""Attribute with the sampler of torchvision's region proposal network and heads."""


class PictureSampler(nn.Module):
    """Samples boxes to learn from, uniformly, with a random stream for each image.

    Like torchvision's `BalancedPositiveNegativeSampler` (Ren et al., arXiv 1506.01497, section
    3.1.3) it takes at most `positive_fraction` of `batch_size_per_image` boxes with an object, and
    background boxes otherwise.  Each box gets a random key, and the smallest keys are sampled: one
    box more or less does not change the keys of others, nor do boxes of another image.

    It is a module, so that each replica of DataParallel has its own.
    """

    def __init__(
        self, batch_size_per_image: int, positive_fraction: float, stream: int, *, of_anchors: bool
    ) -> None:
        super().__init__()
        self.batch_size_per_image = batch_size_per_image
        self.positive_fraction = positive_fraction
        self.stream = stream
        self.of_anchors = of_anchors
        self.seeds: Sequence[int] = ()
        """Seeds of the images of the current call."""
        self.record: Callable[[str], None] | None = None
        """Called with each image's seed and a hash of the sampled anchors; copies to the host.

        Anchors are a fixed grid, so that their sampling does not depend on rounding."""

    def forward(self, matched: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Masks of the sampled boxes of each image; `matched` is -1: ignored, 0: background."""
        assert len(self.seeds) == len(matched), "the model's hook has set a seed for each image"
        chosen = [self._choose(*pair) for pair in zip(matched, self.seeds, strict=True)]
        if self.record is not None:
            for seed, (positive, negative) in zip(self.seeds, chosen, strict=True):
                self.record(f"{self.stream}/{seed}{self._anchors_of(positive | negative)}")
        return [positive for positive, _ in chosen], [negative for _, negative in chosen]

    def _anchors_of(self, mask: Tensor) -> str:
        if not self.of_anchors:
            return ""
        indices = torch.where(mask)[0].cpu().numpy()
        return "/" + hashlib.sha256(indices.astype("<i8").tobytes()).hexdigest()[:16]

    def _choose(self, matched: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(matched.device).manual_seed(seed ^ self.stream)
        keys = torch.rand(matched.shape, generator=generator, device=matched.device)
        positive, negative = torch.where(matched >= 1)[0], torch.where(matched == 0)[0]
        num_positive = min(
            positive.numel(), int(self.batch_size_per_image * self.positive_fraction)
        )
        num_negative = min(negative.numel(), self.batch_size_per_image - num_positive)
        return (
            _mask(matched, positive, keys, num_positive),
            _mask(matched, negative, keys, num_negative),
        )


def _mask(matched: Tensor, candidates: Tensor, keys: Tensor, count: int) -> Tensor:
    """Mask, uint8, of the `count` candidates with the smallest keys."""
    mask = torch.zeros_like(matched, dtype=torch.uint8)
    smallest = keys[candidates].topk(count, largest=False, sorted=False).indices
    mask[candidates[smallest]] = 1
    return mask


def sample_by_picture(model: nn.Module) -> tuple[PictureSampler, ...]:
    """Replace torchvision's samplers in the model; returns the new ones.

    Their seeds come with the targets (`sampling_seed`) when the model is called.
    """
    owners = [module for module in model.modules() if hasattr(module, SAMPLER)]
    samplers = []
    for stream, owner in enumerate(owners):
        old = getattr(owner, SAMPLER)
        new = PictureSampler(
            old.batch_size_per_image,
            old.positive_fraction,
            stream,
            of_anchors=hasattr(owner, "anchor_generator"),
        )
        setattr(owner, SAMPLER, new)
        samplers.append(new)
    if owners:
        model.register_forward_pre_hook(_give_seeds)
    return tuple(samplers)


def _give_seeds(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Set the seeds of all samplers from the targets, the second argument in training."""
    seeds = [target["sampling_seed"] for targets in args[1:] for target in targets or ()]
    for sampler in module.modules():
        if isinstance(sampler, PictureSampler):
            sampler.seeds = seeds
