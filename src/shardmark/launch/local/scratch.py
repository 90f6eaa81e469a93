"""Folders for temporary files that are gone with their owner, however it ends."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardmark.core.storage import temporary_folder

LOCK_FILE = "owner.lock"
"""Locked while its owner lives, frozen or not, and in whatever PID namespace it is."""


def scratch_prefix() -> str:
    """With the host, whose locks nobody elsewhere sees; short, as names of sockets must be."""
    return f"shardmark-scratch-{hashlib.sha256(platform.node().encode()).hexdigest()[:8]}-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder; it is removed at the end, or by the next process if this one is killed."""
    temporary = temporary_folder()
    _remove_abandoned(temporary)
    folder = Path(tempfile.mkdtemp(prefix=scratch_prefix(), dir=temporary))
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


def _remove_abandoned(temporary: Path) -> None:
    """Remove this user's folders of this machine whose owners have died without doing so."""
    for folder in temporary.glob(f"{scratch_prefix()}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / LOCK_FILE).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # in use, gone meanwhile, or without a lock
            continue
