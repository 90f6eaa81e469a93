"""Hashes that show that ranks and strategies start and end the same, and see the same data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Hash of names, shapes and values, in order of name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sample_order_sha256(steps: Iterable[tuple[int, ...]]) -> str:
    """Hash of the sample ids of every step, in the order trained on."""
    digest = hashlib.sha256()
    for sample_ids in steps:
        digest.update(np.asarray(sample_ids, dtype="<i8").tobytes())
        digest.update(b";")
    return digest.hexdigest()
