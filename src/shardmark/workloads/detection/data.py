"""The data sets of detection, and trained weights.  Imports torch only to decode pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardmark.core.errors import DataError
from shardmark.workloads.detection import coco, digits_detection
from shardmark.workloads.detection.weights import PUBLISHED, ensure

if TYPE_CHECKING:
    from shardmark.workloads.detection.coco import AnnotatedPictures
    from shardmark.workloads.detection.options import DetectionOptions


def check(options: DetectionOptions) -> int:
    """The number of training samples; `DataError` or `InputError` without data or weights."""
    training, _, _ = coco.read_splits(_folder(options), options)
    published = PUBLISHED.get(options.weights or "")
    if published is not None:
        ensure(published[options.model], download=options.download)
    elif options.weights is not None and not Path(options.weights).expanduser().is_file():
        raise DataError(
            "workload.weights",
            f"there is no file {options.weights}",
            "null, coco, imagenet, or a file of the model's state dictionary",
        )
    return options.training_samples or len(training)


def paths(options: DetectionOptions) -> tuple[Path, ...]:
    """Annotation files, picture folders, and the user's own weights."""
    own = options.weights is not None and options.weights not in PUBLISHED
    weights = [Path(str(options.weights)).expanduser()] if own else []
    return (*coco.paths(_folder(options)), *weights)


def load(options: DetectionOptions, seed: int) -> AnnotatedPictures:
    """Find the pictures; they are decoded when they are read."""
    return coco.load(_folder(options), options, seed)


def _folder(options: DetectionOptions) -> Path:
    """The data in COCO's layout; digits are drawn there first."""
    if options.dataset == "coco":
        return options.folder
    folder = options.folder if options.data_dir else digits_detection.default_folder()
    digits_detection.make(folder)
    return folder
