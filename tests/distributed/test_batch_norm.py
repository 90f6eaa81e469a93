"""Synchronised batch norms on two ranks compute as one norm of all samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from shardmark.ranks.strategies.base import RankContext
from shardmark.ranks.strategies.batch_norm import synchronise_batch_norms
from tests.distributed.ranks import run_ranks

NORMS: dict[str, Callable[[], nn.Module]] = {
    "of vectors": lambda: nn.BatchNorm1d(3),
    "of maps": lambda: nn.BatchNorm2d(3, momentum=None),
    "bare": lambda: nn.BatchNorm2d(3, affine=False, track_running_stats=False),
}
PARTS = (slice(0, 5), slice(5, 6))
"""Samples of each rank: the second one has a single one, which torch alone would refuse."""


def normed(norm: nn.Module, part: slice, steps: int = 2) -> dict[str, Tensor]:
    """Outputs, gradients of an uneven loss and buffers."""
    shape = (6, 3) if isinstance(norm, nn.BatchNorm1d) else (6, 3, 2, 4)
    draws = torch.Generator().manual_seed(1)
    found: dict[str, Tensor] = {}
    for step in range(steps):
        whole, wanted = (3 + 2 * torch.randn(shape, generator=draws) for _ in range(2))
        inputs = whole[part].requires_grad_()
        outputs = norm(inputs)
        (outputs * wanted[part]).sum().backward()
        assert inputs.grad is not None
        found |= {f"outputs {step}": outputs.detach(), f"gradient {step}": inputs.grad}
    found |= {f"{name}'s": p.grad for name, p in norm.named_parameters() if p.grad is not None}
    return found | {f"{name}, tracked": buffer for name, buffer in norm.named_buffers()}


def work(context: RankContext) -> dict[str, dict[str, Tensor]]:
    part = PARTS[context.rank]
    return {
        name: normed(synchronise_batch_norms(made(), context.device), part)
        for name, made in NORMS.items()
    }


def test_synchronised_norms_are_one_norm_of_all_samples(tmp_path: Path) -> None:
    ranks = run_ranks(work, world_size=2, directory=tmp_path)
    for name, made in NORMS.items():
        for key, expected in normed(made(), slice(0, 6)).items():
            parts = [rank[name][key] for rank in ranks]
            if key.endswith("tracked"):
                assert torch.equal(*parts)
                torch.testing.assert_close(parts[0], expected)
            else:  # parameters' gradients are added up by whatever reduces them
                combined = sum(parts) if key.endswith("'s") else torch.cat(parts)
                torch.testing.assert_close(combined, expected, rtol=1e-5, atol=1e-5)
