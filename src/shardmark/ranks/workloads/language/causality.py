"""Checks that a causal model does not see the tokens that it predicts.  Imports torch."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardmark.base.errors import InputError
from shardmark.ranks.workloads.language.options import LanguageOptions
from shardmark.ranks.workloads.model_building import nonzero_parameters, preserved_generators

TOLERANCE = 1e-5
"""Deviation that rounding may cause, relative to the largest logit: experts sum in any order."""
_LENGTH = 8

logger = logging.getLogger(__name__)


def check_causal(
    options: LanguageOptions,
    model: nn.Module,
    logits: Callable[[nn.Module, Tensor], Tensor],
    *,
    vocabulary: int,
) -> None:
    """Raise `InputError` if the last token changes the logits of the tokens before it.

    Copies of the model read two short inputs in evaluation mode; the model is not changed.
    A model that cannot run here, such as one that needs a GPU, is not checked.
    """
    name, sequence_length = options.model, options.sequence_length
    shared = nonzero_parameters(model)

    def before_last(tokens: Tensor) -> Tensor:
        """Logits (1, length - 1, vocabulary), with the same random numbers in each call."""
        with torch.no_grad(), preserved_generators():
            copied = copy.deepcopy(model, dict(shared))
            copied.eval()  # a user's method may return nothing
            return logits(copied, tokens)[:, :-1].float()

    for length in sorted({min(_LENGTH, sequence_length), sequence_length}):
        first = torch.arange(length)[None] % vocabulary
        second = first.clone()
        second[0, -1] = (second[0, -1] + vocabulary // 2) % vocabulary
        try:
            logits_first, logits_second = before_last(first), before_last(second)
        except Exception as error:  # any error of the model: some accept only full samples
            logger.info("%s cannot compute logits on the CPU: %s", name, error)
            continue
        if (logits_first - logits_second).abs().max() > TOLERANCE * logits_first.abs().max():
            raise InputError(
                "workload.model",
                f"{name} is not causal: the last token changes the logits of the tokens before it",
                "use causal attention (is_decoder: true in the configuration of a BERT), or set"
                " objective: masked",
            )
        return
