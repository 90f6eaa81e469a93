"""Batches of tokens with their targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from shardmark.ranks.workloads.language.gpt import positions_in
from shardmark.ranks.workloads.language.options import MASK_SHARE
from shardmark.ranks.workloads.sampled_task import SampledBatch, gpu_in_use

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from shardmark.ranks.workloads.language.data import Windows

IGNORED = -100
"""Target of a position without prediction; torch's cross entropy ignores it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch(SampledBatch):
    """Token sequences of one step, with targets."""

    inputs: Tensor
    """(n, width), int64."""
    targets: Tensor
    """(n, width), int64; `IGNORED` at positions without prediction."""
    documents: Tensor | None
    """(n, width), int64: attention is restricted to equal numbers; None if it is not restricted."""
    positions: Tensor | None = None
    """(n, part of the width), int64: positions of inputs and targets if they are a part of each
    sequence.  `documents` then still covers the full sequences."""


def part_of_sequences(batch: TokenBatch, index: int, count: int, *, causal: bool) -> TokenBatch:
    """Cut one of `count` equal parts out of all sequences, which are padded to a multiple of it."""
    width = batch.inputs.shape[1]
    padding, documents = -width % count, batch.documents
    if padding and documents is None and not causal:
        documents = torch.zeros_like(batch.inputs)  # excludes the padding from attention

    def cut(tokens: Tensor, filler: int = 0) -> Tensor:
        return functional.pad(tokens, (0, padding), value=filler).chunk(count, dim=1)[index]

    return replace(
        batch,
        inputs=cut(batch.inputs),
        targets=cut(batch.targets, IGNORED),
        documents=None if documents is None else functional.pad(documents, (0, padding), value=-1),
        positions=cut(positions_in(batch.inputs, documents).expand_as(batch.inputs)),
    )


def next_tokens(windows: Windows, filler: int) -> dict[str, Any]:
    """Fields of a batch that predicts each token from the tokens before it."""
    inputs, targets = windows.tokens[:, :-1].copy(), windows.tokens[:, 1:].copy()
    lengths = windows.lengths - 1
    padded = np.arange(inputs.shape[1]) >= lengths[:, None]
    inputs[padded], targets[padded] = filler, IGNORED
    documents = None if windows.documents is None else windows.documents[:, :-1]
    return _fields(inputs, targets, documents)


def masked_tokens(
    windows: Windows,
    filler: int,
    *,
    mask: int,
    num_tokens: int,
    draws: Sequence[np.random.Generator],
) -> dict[str, Any]:
    """Fields of a batch that predicts 15 % of the tokens from all others.

    80 % of these tokens are masked, 10 % are replaced by another token and 10 % are unchanged
    (Devlin et al., 2019).  `draws` has a generator for each sample.
    """
    inputs = windows.tokens
    padded = np.arange(inputs.shape[1]) >= windows.lengths[:, None]
    inputs[padded] = filler
    targets = np.full_like(inputs, IGNORED)
    for row, (length, count) in enumerate(
        zip(windows.lengths, masked_counts(windows.lengths), strict=True)
    ):
        chosen = draws[row].permutation(length)[:count]
        targets[row, chosen] = inputs[row, chosen]
        uniform, others = draws[row].random(count), draws[row].integers(0, num_tokens, count)
        unmasked = np.where(uniform < 0.9, others, inputs[row, chosen])
        inputs[row, chosen] = np.where(uniform < 0.8, mask, unmasked)
    documents = windows.documents
    if documents is None and padded.any():
        documents = padded.astype(np.int64)  # excludes the padding from attention
    return _fields(inputs, targets, documents)


def masked_counts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number of predicted tokens for samples of these lengths: fixed, as in BERT's own code."""
    counts: NDArray[np.int64] = np.maximum(1, np.rint(MASK_SHARE * lengths)).astype(np.int64)
    return counts


def _fields(
    inputs: NDArray[np.int64], targets: NDArray[np.int64], documents: NDArray[np.int64] | None
) -> dict[str, Any]:
    fields = {"inputs": inputs, "targets": targets, "documents": documents}
    return {key: None if values is None else _tensor(values) for key, values in fields.items()}


def _tensor(values: NDArray[np.int64]) -> Tensor:
    """Convert to a tensor, in page-locked memory if this process uses a GPU."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory() if gpu_in_use() else tensor
