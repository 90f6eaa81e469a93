"""scikit-learn's handwritten digits: the embedded default.  Imports torch only in `load`."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from shardmark.core.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shardmark.workloads.datasets.sources import LabelledPictures
    from shardmark.workloads.vision.options import ClassificationOptions

    Split = tuple[NDArray[np.uint8], NDArray[np.int64]]

IMAGE_SIZE = 32
SAMPLES = 1797
VALIDATION_EVERY = 5
VALIDATION_SAMPLES = 360


def check(options: ClassificationOptions) -> int:
    """Raise `DataError` without scikit-learn, `InputError` for more samples than there are."""
    check_installed()
    return options.check_sample_counts(SAMPLES - VALIDATION_SAMPLES, VALIDATION_SAMPLES)


def check_installed() -> None:
    if find_spec("sklearn") is None:
        raise DataError("digits", "scikit-learn is not installed", "pip install scikit-learn")


def paths(options: ClassificationOptions) -> tuple[Path, ...]:  # noqa: ARG001  (one signature)
    """scikit-learn ships them, so that its version tells which they are."""
    return ()


def load(options: ClassificationOptions, seed: int) -> LabelledPictures:  # noqa: ARG001
    import torch

    from shardmark.workloads.datasets.sources import InMemory, LabelledPictures

    check_installed()
    size = options.image_size or IMAGE_SIZE
    training, validation = (
        InMemory(torch.from_numpy(pictures), torch.from_numpy(labels), size)
        for pictures, labels in read_splits()
    )
    return LabelledPictures(
        training=training,
        validation=validation,
        classes=tuple("0123456789"),
        image_size=size,
        mean=(0.306, 0.306, 0.306),  # of the training pictures at 32 x 32
        std=(0.324, 0.324, 0.324),
    )


@cache
def read_splits() -> tuple[Split, Split]:
    """Training and validation digits: pictures (n, 1, 8, 8) and labels (n,).  Imports no torch.

    A fixed split: with the samples sorted by class, each fifth one validates.
    """
    import numpy as np

    spec = find_spec("sklearn")
    assert spec is not None, "checked"
    assert spec.origin is not None
    # The file that scikit-learn ships: importing scikit-learn takes seconds of every rank.
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if path.is_file():
        rows = np.loadtxt(path, delimiter=",", dtype=np.int64)  # 64 values of 0 to 16, label
        values, labels = rows[:, :-1], rows[:, -1]
    else:
        from sklearn.datasets import load_digits

        values, labels = load_digits(return_X_y=True)
    pictures = np.rint(values * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = labels.astype(np.int64)
    by_class = np.argsort(labels, kind="stable")
    validating = np.zeros(len(labels), np.bool_)
    validating[by_class[::VALIDATION_EVERY]] = True
    return (
        (pictures[~validating], labels[~validating]),
        (pictures[validating], labels[validating]),
    )
