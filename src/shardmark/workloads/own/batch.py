"""Batches of whatever a task's data set gives: cut, moved and pinned by their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from shardmark.core.errors import InputError
from shardmark.workloads.sampled_task import SampledBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnBatch(SampledBatch):
    """Collated samples of one step."""

    content: Any
    """What `collate` made: tensors, or nested mappings, lists and tuples of them."""

    def to(self, device: torch.device) -> Self:
        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=tensor.is_pinned())

        if device.type == "cpu":
            return self
        return replace(self, content=with_tensors(self.content, moved))

    def pin_memory(self) -> Self:
        """A copy in page-locked memory; the loader's pinning thread calls it."""
        return replace(self, content=with_tensors(self.content, Tensor.pin_memory))

    def _contents_of(self, which: slice) -> dict[str, Any]:
        samples = len(self)

        def part(value: Tensor) -> Tensor:
            if value.dim() == 0 or len(value) != samples:
                raise InputError(
                    "recipe.gradient_accumulation",
                    f"a batch of {samples} samples has a tensor of shape {tuple(value.shape)}, "
                    "which cannot be cut into micro-batches",
                    "let collate make tensors whose first axis is the sample",
                )
            return value[which]

        return {"content": with_tensors(self.content, part)}


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed; other values stay."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: with_tensors(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(with_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(with_tensors(item, change) for item in value)
    return value
