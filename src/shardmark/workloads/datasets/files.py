"""Files of data sets: where made ones are kept, and pictures that may be broken.  No torch."""

from __future__ import annotations

import os
import shutil
import struct
import uuid
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

from shardmark.core.errors import DataError

Decoded = TypeVar("Decoded")


def cache_folder() -> Path:
    """$SHARDMARK_CACHE, else $XDG_CACHE_HOME/shardmark, else ~/.cache/shardmark.  May not exist.

    Whatever lies there can be deleted at any time: it is made again.
    """
    own = os.environ.get("SHARDMARK_CACHE")
    if own:
        return Path(own).expanduser()
    users = os.environ.get("XDG_CACHE_HOME")
    return (Path(users) if users else Path("~/.cache")).expanduser() / "shardmark"


def make_folder(
    folder: Path, write: Callable[[Path], object], is_made: Callable[[], bool], remedy: str
) -> None:
    """All or nothing: written beside and renamed, so that any number of processes may do it.

    `is_made` tells after a failure whether another process made it meanwhile; `DataError` if not.
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
    """What becomes of pictures that cannot be read."""

    skip: bool
    """Go on without them, and name them; else the first one ends the trial."""
    replace: bool
    """Let the next readable sample take the place, as training needs; else leave it out."""


def read_pictures(
    ids: Iterable[int],
    decode: Callable[[int], Decoded],
    *,
    path: Callable[[int], Path],
    samples: int,
    broken: BrokenPictures,
) -> tuple[list[int], list[Decoded], tuple[str, ...]]:
    """Samples that could be read of those asked for, what `decode` made of them, and the errors.

    `path` names the file of one of so many `samples` that there are.
    """
    from PIL import Image

    # What Pillow raises for files that are cut off, or no pictures.
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
                        f"cannot be read as a picture ({error})",
                        "replace or remove it, or set workload.on_broken: skip",
                    ) from error
                errors.append(f"{path(sample)}: cannot be read ({error})")
                continue
            read.append(sample)
            break
        else:
            if broken.replace:
                folder = str(path(wanted).parent)
                raise DataError(folder, "no picture can be read", "put readable ones there")
    return read, pictures, tuple(errors)


def few_of(names: Sequence[object]) -> str:
    """The first five, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(str(name) for name in names[:5]) + more
