"""Handwritten digits on canvases: the embedded default of detection.

Made once, from scikit-learn's digits and a seed of its own, in COCO's layout: what is read and
evaluated later is read and evaluated as any other data set in that layout.
"""

from __future__ import annotations

import shutil
import uuid
from importlib.util import find_spec
from pathlib import Path

from shardmark.core.errors import DataError
from shardmark.workloads.datasets.cache import cache_folder
from shardmark.workloads.datasets.digits import read_splits

VERSION = 1
"""Goes up when any pixel or annotation changes."""
TRAINING_PICTURES = 1600
VALIDATION_PICTURES = 250

_MARKER = "digits-detection.txt"


def default_folder() -> Path:
    return cache_folder() / f"digits-detection-{VERSION}"


def make(
    folder: Path, *, training: int = TRAINING_PICTURES, validation: int = VALIDATION_PICTURES
) -> None:
    """Write the data set into this folder, all or nothing, unless it is there already.

    It is drawn in a folder beside and renamed, so that any number of processes may do it at once.
    Raises `DataError` where the folder has other files or cannot be written.
    """
    content = f"digits-detection, version {VERSION}: {training} + {validation} pictures\n"
    folder = folder.resolve()
    if _is_finished(folder, content):
        return
    beside = folder.parent / f".{folder.name}-{uuid.uuid4().hex}"
    try:
        beside.mkdir(parents=True)
        _write(beside, training, validation)
        (beside / _MARKER).write_text(content, encoding="utf-8")
        beside.rename(folder)  # replaces no folder but an empty one
    except OSError as error:
        if not _is_finished(folder, content):  # nor did another process make it meanwhile
            raise DataError(
                str(folder),
                f"digits-detection cannot be made ({error.strerror})",
                "set workload.data_dir, or $SHARDMARK_CACHE, to a folder that can be written",
            ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _is_finished(folder: Path, content: str) -> bool:
    """Whether the data set is there; raises `DataError` where something else is."""
    marker = folder / _MARKER
    if marker.is_file():
        found = marker.read_text(encoding="utf-8", errors="replace").strip()
        if found != content.strip():
            raise DataError(
                str(folder),
                f"holds another version ({found[:80]!r}, not {content.strip()!r})",
                "remove the folder, or set workload.data_dir to another one",
            )
        return True
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(
            str(folder),
            "holds other files; digits-detection is made in a new or empty folder only",
            "set workload.data_dir to another folder, or leave it out for the cache folder",
        )
    return False


def _write(folder: Path, training: int, validation: int) -> None:
    if find_spec("sklearn") is None:
        raise DataError(
            "digits-detection", "scikit-learn is not installed", "pip install scikit-learn"
        )
    from shardmark.workloads.detection.digit_canvases import Glyphs, write_split

    wanted = (("train2017", 1, training), ("val2017", 100_001, validation))
    for split, (pictures, labels) in enumerate(read_splits()):
        name, first_id, count = wanted[split]
        glyphs = Glyphs(pictures=pictures[:, 0], labels=labels)
        write_split(folder, name, glyphs, split=split, first_id=first_id, count=count)
