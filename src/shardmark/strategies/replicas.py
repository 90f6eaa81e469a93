"""DataParallel for models that take lists of samples."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Replicas(nn.DataParallel[nn.Module]):
    """Shares lists out by their items, a sample each; torch would cut every picture into strips.

    Other inputs are torch's to share.
    """

    def scatter(
        self,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        device_ids: Sequence[int | torch.device],
    ) -> Any:
        if not any(isinstance(value, list) for value in inputs):
            return super().scatter(inputs, kwargs, device_ids)
        cut = [shares(value, len(device_ids)) for value in inputs]
        used = device_ids[: min(map(len, cut))]
        scattered = tuple(
            tuple(moved(part[place], device) for part in cut) for place, device in enumerate(used)
        )
        return scattered, tuple(moved(dict(kwargs or {}), device) for device in used)

    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        with warnings.catch_warnings():
            # Each device's losses are scalars; a vector of them is what is wanted.
            warnings.filterwarnings("ignore", message="Was asked to gather along dimension 0")
            return super().gather(outputs, output_device)


def shares(value: Any, parts: int) -> list[Any]:
    """Consecutive pieces, at most `parts`, as large as `torch.chunk` makes them."""
    if isinstance(value, Tensor):
        return list(value.chunk(parts))
    assert isinstance(value, list), "a model takes tensors and lists of samples"
    size = -(-len(value) // parts)
    return [value[start : start + size] for start in range(0, len(value), size)]


def moved(value: Any, device: int | torch.device) -> Any:
    """The same value with every tensor in it on the device."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(moved(item, device) for item in value)
    return value
