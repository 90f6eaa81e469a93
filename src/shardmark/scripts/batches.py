"""Batches of several ranks, put together to the batch of one process."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree  # torch has no public one
from torch import Tensor
from torch.func import debug_unwrap

IGNORED = -100
"""Target that torch's loss functions ignore."""


def padding_of(batches: Sequence[Any]) -> dict[int, tuple[bool, int]]:
    """Return by the addresses of tensors if they are padded on the left, and with which token.

    Tokens show it: some rows begin, or end, with more of one token than others of their batch.
    Tensors that always have the first two sizes of theirs are padded alike: with zeros if one of
    them is a mask.
    """
    by_shapes: defaultdict[tuple[torch.Size, ...], list[Tensor]] = defaultdict(list)
    for tensors in zip(*map(leaves, batches), strict=False):
        by_shapes[tuple(tensor.shape[:2] for tensor in tensors)] += tensors
    padding: dict[int, tuple[bool, int]] = {}
    for shapes, same in by_shapes.items():
        (begins, first), (ends, last) = _rows_with_runs(same), _rows_with_runs(same, 1)
        has_mask = any(bool((t < 2).all()) for t in same if t.numel() and not t.is_floating_point())
        if len({shape[1:] for shape in shapes}) > 1:
            facts = begins > ends, 0 if has_mask else first if begins > ends else last
            padding |= dict.fromkeys((tensor.data_ptr() for tensor in same), facts)
    return padding


def _rows_with_runs(batches: Sequence[Tensor], *flipped: int) -> tuple[int, int]:
    """Rows that begin with more of a token than another row of their batch: most, and the token."""
    rows: Counter[int] = Counter()
    for tokens in (tensor.flip(flipped) for tensor in batches if tensor.dim() == 2):
        real = tokens.is_floating_point() or not tokens.numel()
        if not real and tokens.min() >= 0 and tokens.max() > 1:
            runs = (tokens == tokens[:, :1]).cumprod(1).sum(1)
            rows.update(tokens[runs > runs.min(), 0].tolist())
    return max(((count, token) for token, count in rows.items() if count > 1), default=(0, 0))


def joined(
    parts: Sequence[Any],
    size: int | None = None,
    *,
    sections: int = 1,
    padding: Mapping[int, tuple[bool, int]] | None = None,
) -> Any:
    """Concatenate batches, first sections before second ones, and pad tensors to one length."""
    first = parts[0]
    join = partial(joined, size=size, sections=sections, padding=padding)
    if isinstance(first, Tensor):
        left, token = (padding or {}).get(first.data_ptr(), (False, 0))
        return _concatenated(parts, sections=sections, left=left, token=token)
    if isinstance(first, Mapping) or (hasattr(first, "data") and hasattr(first, "keys")):
        return type(first)({key: join([part[key] for part in parts]) for key in first})
    if names := _fields(first):
        joints = {name: join([getattr(part, name) for part in parts]) for name in names}
        return (dataclasses.replace if dataclasses.is_dataclass(first) else _changed)(
            first, **joints
        )
    if isinstance(first, list | tuple):
        if _lists_samples(first, size):
            return type(first)(value for part in parts for value in part)
        values = [join(same) for same in zip(*parts, strict=True)]
        return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)
    return first


def _changed(value: Any, **fields: Any) -> Any:
    together = copy.copy(value)
    together.__dict__.update(fields)
    return together


def _fields(value: Any) -> list[str]:
    """Names of the fields of a dataclass, or of the tensors of another object.

    None of an object with a number, which may be one of its rows or targets.
    """
    if isinstance(value, type | Tensor | torch.nn.Module | list | tuple):
        return []
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    values = getattr(value, "__dict__", {})
    tensors = {name: v for name, v in values.items() if isinstance(v, Tensor)}
    counts = any(isinstance(v, int | float) and not isinstance(v, bool) for v in values.values())
    return [] if counts or any(not tensor.dim() for tensor in tensors.values()) else [*tensors]


def _lists_samples(values: Sequence[Any], batch_size: int | None) -> bool:
    """True for a sequence with an entry for each sample, such as images of other sizes."""
    if all(isinstance(value, str | int | float) for value in values):
        return True
    return (
        batch_size is not None
        and len(values) == batch_size
        and len({type(value) for value in values if value is not None}) == 1
        and any(_rows(value) != batch_size for value in values)
    )


def _rows(value: Any) -> int | None:
    """Number of samples that a part of a batch has, if it has a row for each."""
    if isinstance(value, Tensor):
        return len(value) if value.dim() else None
    return len(value) if isinstance(value, list | tuple) else None


def _concatenated(parts: Sequence[Tensor], *, sections: int, left: bool, token: int) -> Tensor:
    if parts[0].dim() == 0:
        return parts[0]
    if any(part.dim() != parts[0].dim() for part in parts):
        return torch.cat([part.flatten() for part in parts])
    longest = [max(part.shape[d] for part in parts) for d in range(1, parts[0].dim())]
    ignored = any(bool((part == IGNORED).any()) for part in parts if not part.is_floating_point())
    padded = []
    for part in parts:
        missing = [size - part.shape[d + 1] for d, size in enumerate(longest)]
        pads = [n for size in reversed(missing) for n in ((size, 0) if left else (0, size))]
        value = IGNORED if ignored else 0 if part.is_floating_point() else token
        padded.append(torch.nn.functional.pad(part, pads, value=value) if any(pads) else part)
    if any(len(part) % sections for part in padded):
        return torch.cat(padded)
    chunks = zip(*(part.chunk(sections) for part in padded), strict=True)
    return torch.cat([section for same in chunks for section in same])


def copied(batch: Any) -> Any:
    """A copy of a batch, which the script may change; the batch itself if it cannot be copied."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # classes of the script may raise anything
        return batch


def leaves(batch: Any) -> list[Tensor]:
    """Tensors of a batch, in order."""
    tensors: list[Tensor] = []
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            tensors += [debug_unwrap(leaf).detach()] if leaf.dim() else []
        elif isinstance(leaf, Mapping) or isinstance(getattr(leaf, "data", None), dict):
            tensors += leaves(dict(leaf if isinstance(leaf, Mapping) else leaf.data))
        elif names := _fields(leaf):
            tensors += leaves([getattr(leaf, name) for name in names])
    return tensors


def row_checksums(tensor: Tensor) -> Tensor:
    """A number for each row, shape (rows,), in fp64; equal rows have equal numbers."""
    rows = tensor.detach().to("cpu", torch.float64).reshape(len(tensor), -1)
    places = torch.arange(1, rows.shape[1] + 1, dtype=torch.float64)
    return debug_unwrap(rows @ torch.cos(places))  # torch.func wraps it


def checksum(tensor: Tensor) -> float:
    """A number that equal tensors share, linear in the tensor."""
    return float(row_checksums(tensor.flatten()[None])[0])


def mean_checksum(value: Tensor) -> float:
    """A checksum of the mean of each channel, as batch norm takes it."""
    others = [dimension for dimension in range(value.dim()) if dimension != 1]
    return checksum(value.detach().mean(others, dtype=torch.float64))
