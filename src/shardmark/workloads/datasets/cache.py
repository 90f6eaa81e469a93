"""Arrays kept between processes in the user's cache folder.  Imports no torch.

What is there can be deleted at any time: it is made again from the user's own files.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Arrays = dict[str, "NDArray[Any]"]

_UNFINISHED = "unfinished-"


def cache_folder() -> Path:
    """$SHARDMARK_CACHE, else $XDG_CACHE_HOME/shardmark, else ~/.cache/shardmark.  May not exist."""
    own = os.environ.get("SHARDMARK_CACHE")
    if own:
        return Path(own).expanduser()
    users = os.environ.get("XDG_CACHE_HOME")
    return (Path(users) if users else Path("~/.cache")).expanduser() / "shardmark"


def entry_of(kind: str, file: Path, version: int) -> Path:
    """Where arrays made from this file are kept: another path, size, time or version is another
    place."""
    stat = file.stat()
    place = hashlib.sha256(os.fsencode(file.absolute())).hexdigest()[:16]
    state = f"{stat.st_size}-{stat.st_mtime_ns}-{version}"
    return cache_folder() / kind / f"{file.stem}-{place}" / state


def load_arrays(entry: Path, names: Sequence[str]) -> Arrays | None:
    """The arrays, mapped into memory and read when they are used; None if not there, or damaged."""
    try:
        return {
            name: np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False).view(np.ndarray)
            for name in names
        }
    except (OSError, ValueError, EOFError):
        return None


def save_arrays(entry: Path, arrays: Mapping[str, NDArray[Any]]) -> bool:
    """Keep the arrays, all or none, in place of older ones from the same file; False if the cache
    cannot be written."""
    unfinished = entry.with_name(f"{_UNFINISHED}{os.getpid()}-{uuid4().hex}")
    try:
        unfinished.mkdir(parents=True)
        for name, array in arrays.items():
            np.save(unfinished / f"{name}.npy", array, allow_pickle=False)
        for older in entry.parent.iterdir():
            if not older.name.startswith(_UNFINISHED):
                shutil.rmtree(older, ignore_errors=True)
        unfinished.rename(entry)
    except OSError:  # no room, no right to write, or another process was first
        shutil.rmtree(unfinished, ignore_errors=True)
        return False
    return True
