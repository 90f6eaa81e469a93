"""COCO 2017, or the user's own pictures in its layout.  Imports torch only in `load`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from shardmark.core.errors import DataError
from shardmark.workloads.datasets.checks import check_sample_counts
from shardmark.workloads.detection.coco_split import (
    CocoSplit,
    check_same_categories,
    training_split,
    validation_split,
)
from shardmark.workloads.models import is_user_function
from shardmark.workloads.order import subset

if TYPE_CHECKING:
    from pathlib import Path

    from shardmark.workloads.detection.annotated import AnnotatedPictures
    from shardmark.workloads.detection.options import DetectionOptions
    from shardmark.workloads.vision.options import ClassificationOptions


def check(options: DetectionOptions) -> None:
    """Raise `DataError` or `InputError` for what is wrong; keep the annotations in the cache."""
    assert options.folder is not None, "the options ask for it"
    check_folder(options.folder, options)


def load(options: DetectionOptions, seed: int) -> AnnotatedPictures:
    """Find the pictures; they are decoded when they are read."""
    assert options.folder is not None, "the options ask for it"
    return load_folder(options.folder, options, seed)


def check_folder(folder: Path, options: DetectionOptions) -> None:
    """As `check`, for data in this folder.  Imports no torch."""
    _found(folder, options)


def load_folder(folder: Path, options: DetectionOptions, seed: int) -> AnnotatedPictures:
    """As `load`, for data in this folder.  Samples are pictures by ascending id."""
    from shardmark.workloads.detection.annotated import AnnotatedPictures
    from shardmark.workloads.detection.coco_source import CocoSource

    found = _found(folder, options)
    sources = []
    for split, (shown, wanted) in enumerate(
        (
            (found.training, options.training_samples),
            (found.validation, options.validation_samples),
        )
    ):
        ids = subset(len(shown), wanted, seed=seed, split=split)
        sources.append(
            CocoSource(
                split=shown if ids is None else shown.select(ids),
                with_masks=found.with_masks,
                skip_broken=options.on_broken == "skip",
                replace_broken=shown is found.training,
            )
        )
    categories = found.training.index.categories
    return AnnotatedPictures(
        training=sources[0],
        validation=sources[1],
        classes=tuple(categories.values()),
        category_ids=tuple(categories),
        notes=found.notes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    training: CocoSplit
    validation: CocoSplit
    with_masks: bool
    notes: tuple[str, ...]


def _found(folder: Path, options: DetectionOptions) -> _Found:
    """Both splits before subsets are drawn."""
    training, notes = training_split(folder)
    validation = validation_split(folder)
    check_same_categories(training, validation)
    training, missing = _without_missing(training, options)
    validation, missing_in_validation = _without_missing(validation, options)
    if options.pictures_without_objects == "drop":
        training = training.without_empty()
    if not training.objects:
        raise DataError(
            str(training.file), "no object in it can be learned", "annotate some, crowds aside"
        )
    check_sample_counts(
        cast("ClassificationOptions", options),  # which has the same three fields
        len(training),
        len(validation),
    )
    return _Found(
        training=training,
        validation=validation,
        with_masks=_with_masks(options, training, validation),
        notes=(*notes, *missing, *missing_in_validation),
    )


def _without_missing(
    split: CocoSplit, options: DetectionOptions
) -> tuple[CocoSplit, tuple[str, ...]]:
    """The split without pictures whose file is not there, and a line for each of them."""
    missing = split.missing()
    if len(missing) == len(split):
        raise DataError(
            str(split.root), f"has none of the pictures of {split.file.name}", "put them there"
        )
    if missing and options.on_broken == "fail":
        names = ", ".join(split.path(sample).name for sample in missing[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise DataError(
            str(split.root),
            f"{len(missing)} of {len(split)} pictures are missing: {names}{more}",
            "put them there, or set workload.on_broken: skip",
        )
    notes = tuple(f"{split.path(sample)}: no such file" for sample in missing)
    if missing:
        split = split.select(np.delete(np.arange(len(split)), missing))
    return split, notes


def _with_masks(options: DetectionOptions, *splits: CocoSplit) -> bool:
    """Whether masks are read: if the model learns them, and all objects have one."""
    if not options.with_masks:
        return False
    for split in splits:
        without = split.first_without_mask()
        if without is not None:
            if is_user_function(options.model):
                return False  # it may not want them
            raise DataError(
                str(split.file),
                f"annotation {without} has no segmentation, which {options.model} learns from",
                "add it, or choose a model without masks",
            )
    return True
