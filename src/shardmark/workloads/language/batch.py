"""Batches of tokens, and what is to be predicted of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from shardmark.workloads.language.gpt import positions_in
from shardmark.workloads.language.options import MASK_SHARE
from shardmark.workloads.sampled_task import SampledBatch, gpu_in_use

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from shardmark.workloads.language.data import Windows

IGNORED = -100
"""Target of a place where nothing is predicted: what torch's cross entropy leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch(SampledBatch):
    """Samples of one step."""

    inputs: Tensor
    """(n, width), int64."""
    targets: Tensor
    """(n, width), int64; `IGNORED` where nothing is predicted."""
    documents: Tensor | None
    """(n, width), int64: attention stays among equal numbers; None where it need not."""
    positions: Tensor | None = None
    """(n, part of the width), int64: places of inputs and targets that are a part of each sequence;
    documents are whole."""


def part_of_sequences(batch: TokenBatch, index: int, count: int, *, causal: bool) -> TokenBatch:
    """One of equal parts of all sequences; sequences are filled up where the parts would differ."""
    width = batch.inputs.shape[1]
    filled, documents = -width % count, batch.documents
    if filled and documents is None and not causal:
        documents = torch.zeros_like(batch.inputs)  # nobody looks at what is filled up

    def cut(tokens: Tensor, filler: int = 0) -> Tensor:
        return functional.pad(tokens, (0, filled), value=filler).chunk(count, dim=1)[index]

    return replace(
        batch,
        inputs=cut(batch.inputs),
        targets=cut(batch.targets, IGNORED),
        documents=None if documents is None else functional.pad(documents, (0, filled), value=-1),
        positions=cut(positions_in(batch.inputs, documents).expand_as(batch.inputs)),
    )


def next_tokens(windows: Windows, filler: int) -> dict[str, Any]:
    """Fields of a batch that predicts each token from those before it."""
    inputs, targets = windows.tokens[:, :-1].copy(), windows.tokens[:, 1:].copy()
    lengths = windows.lengths - 1
    behind = np.arange(inputs.shape[1]) >= lengths[:, None]
    inputs[behind], targets[behind] = filler, IGNORED
    documents = None if windows.documents is None else windows.documents[:, :-1]
    return _fields(inputs, targets, documents)


def masked_tokens(
    windows: Windows,
    filler: int,
    *,
    mask: int,
    known_tokens: int,
    draws: Sequence[np.random.Generator],
) -> dict[str, Any]:
    """Fields of a batch that predicts 15 % of the tokens from all others.

    Of those, 80 % are masked, 10 % are another token and 10 % are left as they are (Devlin et al.,
    2019).  `draws` has a generator for each sample.
    """
    inputs = windows.tokens
    behind = np.arange(inputs.shape[1]) >= windows.lengths[:, None]
    inputs[behind] = filler
    targets = np.full_like(inputs, IGNORED)
    for row, (length, count) in enumerate(
        zip(windows.lengths, masked_counts(windows.lengths), strict=True)
    ):
        places = draws[row].permutation(length)[:count]
        targets[row, places] = inputs[row, places]
        kinds, others = draws[row].random(count), draws[row].integers(0, known_tokens, count)
        changed = np.where(kinds < 0.8, mask, np.where(kinds < 0.9, others, inputs[row, places]))
        inputs[row, places] = changed
    documents = windows.documents
    if documents is None and behind.any():
        documents = behind.astype(np.int64)  # nobody looks at the padding
    return _fields(inputs, targets, documents)


def masked_counts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens that are predicted of samples of so many: fixed, as in BERT's own code."""
    counts: NDArray[np.int64] = np.maximum(1, np.rint(MASK_SHARE * lengths)).astype(np.int64)
    return counts


def _fields(
    inputs: NDArray[np.int64], targets: NDArray[np.int64], documents: NDArray[np.int64] | None
) -> dict[str, Any]:
    fields = {"inputs": inputs, "targets": targets, "documents": documents}
    return {key: None if values is None else _tensor(values) for key, values in fields.items()}


def _tensor(values: NDArray[np.int64]) -> Tensor:
    """In page-locked memory where this process uses a GPU, so that the copy there need not wait."""
    made = torch.from_numpy(np.ascontiguousarray(values))
    return made.pin_memory() if gpu_in_use() else made
