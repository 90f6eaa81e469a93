"""Folders for temporary files that are gone with their owner, however it ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCRATCH_PREFIX = "shardmark-scratch-"
LOCK_FILE = "owner.lock"
"""Locked while its owner lives, frozen or not, and in whatever PID namespace it is."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder; it is removed at the end, or by the next process if this one is killed."""
    _remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX))
    part = folder / f"{LOCK_FILE}.part"
    with part.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            part.rename(folder / LOCK_FILE)  # nobody sees it unlocked
        except OSError:  # a file system without locks: nobody else removes the folder
            part.unlink(missing_ok=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned() -> None:
    """Remove this user's folders whose owners have died without doing so."""
    for folder in Path(tempfile.gettempdir()).glob(f"{SCRATCH_PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / LOCK_FILE).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # in use, gone meanwhile, or without a lock
            continue
