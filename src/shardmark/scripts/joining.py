"""Tensors of ranks, joined to those of the full model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardmark.scripts.record import Record


def joined_tensors(
    ranks: Sequence[Record], by_rank: Sequence[Sequence[Tensor | None]]
) -> list[Tensor | None]:
    """Tensors of rank 0, or the ranks' slices behind each other where each has a slice (FSDP1)."""
    if not ranks[0].flat_slices or len(ranks) == 1:
        return list(by_rank[0])
    joined: list[Tensor | None] = []
    for slices in zip(*by_rank, strict=True):
        present = [tensor.flatten() for tensor in slices if tensor is not None]
        joined.append(torch.cat(present) if present else None)
    return joined
