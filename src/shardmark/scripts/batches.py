"""Batches of several ranks, put together to the batch of one process."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree  # torch has no public one
from torch import Tensor

IGNORED = -100
"""Target that torch's loss functions ignore."""


def joined(parts: Sequence[Any], batch_size: int | None = None, *, halves: bool = False) -> Any:
    """Concatenate batches, or first halves before second ones, and pad tensors to one length."""
    first = parts[0]
    join = partial(joined, batch_size=batch_size, halves=halves)
    if isinstance(first, Tensor):
        return _concatenated(parts, halves=halves)
    if isinstance(first, Mapping) or (hasattr(first, "data") and hasattr(first, "keys")):
        return type(first)({key: join([part[key] for part in parts]) for key in first})
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return dataclasses.replace(
            first, **{n: join([getattr(part, n) for part in parts]) for n in names}
        )
    if isinstance(first, list | tuple):
        if _lists_samples(first, batch_size):
            return type(first)(value for part in parts for value in part)
        values = [join(same) for same in zip(*parts, strict=True)]
        return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)
    return first


def _lists_samples(values: Sequence[Any], batch_size: int | None) -> bool:
    """True for a sequence with an entry for each sample, such as images of other sizes."""
    if all(isinstance(value, str | int | float) for value in values):
        return True
    return (
        batch_size is not None
        and len(values) == batch_size
        and any(_rows(value) != batch_size for value in values)
    )


def _rows(value: Any) -> int | None:
    """Number of samples that a part of a batch has, if it has a row for each."""
    if isinstance(value, Tensor):
        return len(value) if value.dim() else None
    return len(value) if isinstance(value, list | tuple) else None


def _concatenated(parts: Sequence[Tensor], *, halves: bool) -> Tensor:
    if parts[0].dim() == 0:
        return parts[0]
    if any(part.dim() != parts[0].dim() for part in parts):
        return torch.cat([part.flatten() for part in parts])
    longest = [max(part.shape[d] for part in parts) for d in range(1, parts[0].dim())]
    ignored = any(bool((part == IGNORED).any()) for part in parts if not part.is_floating_point())
    padded = []
    for part in parts:
        missing = [size - part.shape[d + 1] for d, size in enumerate(longest)]
        pads = [number for size in reversed(missing) for number in (0, size)]
        padded.append(
            torch.nn.functional.pad(part, pads, value=IGNORED if ignored else 0)
            if any(pads)
            else part
        )
    if halves and all(len(part) % 2 == 0 for part in padded):
        chunks = zip(*(part.chunk(2) for part in padded), strict=True)
        return torch.cat([half for same in chunks for half in same])
    return torch.cat(padded)


def copied(batch: Any) -> Any:
    """A copy of a batch, which the script may change; the batch itself if it cannot be copied."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # classes of the script may raise anything
        return batch


def leaves(batch: Any) -> list[Tensor]:
    """Tensors of a batch, in order."""
    if hasattr(batch, "data") and isinstance(batch.data, dict):
        batch = batch.data
    flat = pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return [leaf.detach() for leaf in flat if isinstance(leaf, Tensor) and leaf.dim() > 0]


def row_checksums(tensor: Tensor) -> Tensor:
    """A number for each row, shape (rows,), in fp64; equal rows have equal numbers."""
    rows = tensor.detach().to("cpu", torch.float64).reshape(len(tensor), -1)
    places = torch.arange(1, rows.shape[1] + 1, dtype=torch.float64)
    return rows @ torch.cos(places)


def checksum(tensor: Tensor) -> float:
    """A number that equal tensors share, linear in the tensor."""
    return float(row_checksums(tensor.flatten()[None])[0])
