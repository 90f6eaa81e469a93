"""Files of data sets: the cache folder, and reading images that may be broken.  No torch."""

from __future__ import annotations

import os
import shutil
import struct
import uuid
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

from shardmark.base.errors import DataError

Decoded = TypeVar("Decoded")


def cache_folder() -> Path:
    """$SHARDMARK_CACHE, else $XDG_CACHE_HOME/shardmark, else ~/.cache/shardmark.  May not exist.

    Its contents can be deleted at any time and are created again.
    """
    folder = os.environ.get("SHARDMARK_CACHE")
    if folder:
        return Path(folder).expanduser()
    user_cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(user_cache) if user_cache else Path("~/.cache")).expanduser() / "shardmark"


def make_folder(
    folder: Path, write: Callable[[Path], object], is_made: Callable[[], bool], remedy: str
) -> None:
    """Create the folder atomically: `write` fills a temporary folder, which is then renamed.

    Several processes may do so at once.  After a failure `is_made` checks if another process has
    created the folder; raises `DataError` if not.
    """
    beside = folder.parent / f".{folder.name}-{uuid.uuid4().hex}"
    try:
        beside.mkdir(parents=True)
        write(beside)
        beside.rename(folder)  # replaces no folder but an empty one
    except OSError as error:
        if not is_made():
            raise DataError(str(folder), f"cannot be made ({error.strerror})", remedy) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


class BrokenPictures(NamedTuple):
    """The treatment of images that cannot be read."""

    skip: bool
    """Skip and report unreadable images; else the first one ends the trial."""
    replace: bool
    """Use the next readable sample instead, as training needs; else leave the sample out."""


def read_pictures(
    ids: Iterable[int],
    decode: Callable[[int], Decoded],
    *,
    path: Callable[[int], Path],
    samples: int,
    broken: BrokenPictures,
) -> tuple[list[int], list[Decoded], tuple[str, ...]]:
    """Decode images; returns the samples that were read, their content, and the errors.

    `path` returns the file of a sample, and `samples` is the number of samples of the split.
    """
    from PIL import Image

    # Exceptions of Pillow for truncated files, and for files that are no images.
    unreadable = (OSError, SyntaxError, ValueError, struct.error, Image.DecompressionBombError)
    read: list[int] = []
    pictures: list[Decoded] = []
    errors: list[str] = []
    for wanted in ids:
        others = chain(range(wanted + 1, samples), range(wanted)) if broken.replace else ()
        for sample in chain([wanted], others):
            try:
                pictures.append(decode(sample))
            except unreadable as error:
                if not broken.skip:
                    raise DataError(
                        str(path(sample)),
                        f"cannot be read as an image ({error})",
                        "replace or remove it, or set workload.on_broken: skip",
                    ) from error
                errors.append(f"{path(sample)}: cannot be read ({error})")
                continue
            read.append(sample)
            break
        else:
            if broken.replace:
                folder = str(path(wanted).parent)
                raise DataError(folder, "has no readable image", "add readable images")
    return read, pictures, tuple(errors)


def few_of(names: Sequence[object]) -> str:
    """The first five names, and the number of the others."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(str(name) for name in names[:5]) + more
