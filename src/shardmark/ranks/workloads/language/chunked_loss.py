"""Computes the loss inside of the model, with the logits of a part of the sequence at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardmark.base.errors import InputError
from shardmark.ranks.workloads.language.batch import IGNORED

_targets: ContextVar[Tensor | None] = ContextVar("targets", default=None)


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of logits (batch, length, vocabulary), summed in fp32."""
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


@contextmanager
def predicting(targets: Tensor) -> Iterator[None]:
    """Give `ChunkedLoss` the targets (batch, length) of the model's next call in this thread."""
    token = _targets.set(targets)
    try:
        yield
    finally:
        _targets.reset(token)


class ChunkedLoss:
    """The forward of an output layer that returns the summed loss instead of its logits.

    Logits of one piece of the sequence exist at a time: the backward pass computes them again.
    """

    def __init__(self, head: nn.Module, chunks: int) -> None:
        self._logits = head.forward
        self._chunks = chunks

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the loss, shape (), of hidden states (batch, length, width)."""
        targets = _targets.get()
        if targets is None:  # another thread calls the model, as DataParallel does
            raise InputError(
                "workload.loss_chunks",
                "this strategy calls the model in other threads, which have no targets",
                "set it to 1, or use ddp",
            )
        pieces = zip(
            hidden.chunk(self._chunks, dim=1), targets.chunk(self._chunks, dim=1), strict=True
        )
        if hidden.is_meta:  # operations of the model are counted, without those done again
            return torch.stack([self._loss(*piece) for piece in pieces]).sum()
        losses = [
            checkpoint(self._loss, *piece, use_reentrant=False, preserve_rng_state=False)
            for piece in pieces
        ]
        return torch.stack(losses).sum()

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return summed_cross_entropy(self._logits(hidden), targets)
