"""Checks that data sets share.  Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmark.core.errors import InputError

if TYPE_CHECKING:
    from shardmark.workloads.vision.options import ClassificationOptions


def check_sample_counts(options: ClassificationOptions, training: int, validation: int) -> None:
    """Raise `InputError` where the options ask for more samples than there are."""
    for key, wanted, available in (
        ("training_samples", options.training_samples, training),
        ("validation_samples", options.validation_samples, validation),
    ):
        if wanted is not None and wanted > available:
            raise InputError(
                f"workload.{key}", f"found {wanted}", f"{options.dataset} has {available} at most"
            )
