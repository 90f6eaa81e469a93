"""Causes of a deviation that a user may accept."""

from __future__ import annotations

from typing import Literal, get_args

AcceptableCause = Literal[
    "batch_norm_of_share",
    "buffers_differ",
    "equal_draws",
    "gradient_kept",
    "gradient_rescaled",
    "local_steps",
    "precision",
    "short_window",
    "uneven_micro_batches",
    "uneven_weights",
    "whole_batch_loss",
]
"""Deviations of N ranks from one process that a script may have on purpose."""

ACCEPTABLE: tuple[AcceptableCause, ...] = get_args(AcceptableCause)

USUAL: tuple[AcceptableCause, ...] = ("batch_norm_of_share",)
"""Deviations that most scripts with such a model have: they are accepted by default."""
