"""Whether a causal model sees what it is to predict.  Imports torch."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from shardmark.core.errors import InputError
from shardmark.workloads.model_building import generators_kept, nonzero_parameters

if TYPE_CHECKING:
    from torch import Tensor, nn

TOLERANCE = 1e-5
"""Of the largest logit: what rounding may change, as experts sum other tokens together."""
_LENGTH = 8

logger = logging.getLogger(__name__)


def check_causal(
    name: str,
    model: nn.Module,
    logits: Callable[[nn.Module, Tensor], Tensor],
    *,
    vocabulary: int,
    sequence_length: int,
) -> None:
    """Raise `InputError` where the last token changes the logits of the tokens before it.

    The model stays as it is: copies of it read two short inputs, in evaluation mode.
    A model that cannot compute them here, such as one that needs a GPU, is not judged.
    """
    shared = nonzero_parameters(model)

    def before_last(tokens: Tensor) -> Tensor:
        """(1, length - 1, vocabulary); drawn alike each time, as the generators stay."""
        with torch.no_grad(), generators_kept():
            tried = copy.deepcopy(model, dict(shared))
            tried.eval()  # a user's method may return nothing
            return logits(tried, tokens)[:, :-1].float()

    for length in sorted({min(_LENGTH, sequence_length), sequence_length}):
        first = torch.arange(length)[None] % vocabulary
        second = first.clone()
        second[0, -1] = (second[0, -1] + vocabulary // 2) % vocabulary
        try:
            seen, other = before_last(first), before_last(second)
        except Exception as error:  # whatever the model raises: some take only full samples
            logger.info("%s cannot be asked for its logits on the CPU: %s", name, error)
            continue
        if (seen - other).abs().max() > TOLERANCE * seen.abs().max():
            raise InputError(
                "workload.model",
                f"{name} sees what follows: the last token changes the logits before it",
                "let it mask what follows (is_decoder: true in a BERT's configuration),"
                " or set objective: masked",
            )
        return
