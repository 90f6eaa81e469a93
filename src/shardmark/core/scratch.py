"""Folders that are gone with their owners, however those end."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from shardmark.core.storage import temporary_folder

PREFIX = "shardmark-scratch-"


def lock_file() -> str:
    """Locked while its owner lives, frozen or not, and in whatever PID namespace it is.

    Its name tells the host, whose locks nobody elsewhere sees.
    """
    return f"owner-{hashlib.sha256(platform.node().encode()).hexdigest()[:8]}.lock"


def own(folder: Path, until_seconds: float = 0.0) -> int:
    """Keep the folder while this process, or one forked from it, has the descriptor returned.

    And until that Unix time.  Raises `OSError`, on a file system without locks too: then nobody
    else removes the folder.
    """
    lock = folder / lock_file()
    part = lock.with_suffix(".part")
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.utime(descriptor, (until_seconds, until_seconds))
        part.rename(lock)  # nobody sees it unlocked
    except OSError:
        part.unlink(missing_ok=True)
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder; it is removed at the end, or by the next process if this one is killed."""
    temporary = temporary_folder()
    remove_abandoned_scratch(temporary)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=temporary))
    with ExitStack() as stack:
        with suppress(OSError):
            stack.callback(os.close, own(folder))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


def remove_abandoned_scratch(temporary: Path) -> None:
    """Remove this user's folders of this machine whose owners have died without doing so."""
    for folder in temporary.glob(f"{PREFIX}*"):
        remove_if_abandoned(folder)


def remove_if_abandoned(folder: Path) -> None:
    """Remove this user's folder if its owner on this machine is dead, and its time is over."""
    with suppress(OSError), ExitStack() as stack:  # in use, gone meanwhile, or without a lock
        # All goes by this descriptor: who makes a folder of that name anew has another one.
        inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        stack.callback(os.close, inside)
        if not is_private(os.fstat(inside)):
            return
        lock = os.open(lock_file(), os.O_RDWR | os.O_NOFOLLOW, dir_fd=inside)
        stack.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_mtime > time.time():
            return
        with os.scandir(inside) as entries:
            for entry in [*entries]:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.name, dir_fd=inside)
                elif entry.name != lock_file():
                    os.unlink(entry.name, dir_fd=inside)
        os.unlink(lock_file(), dir_fd=inside)  # last: whoever is killed meanwhile leaves it
        folder.rmdir()


def is_private(status: os.stat_result) -> bool:
    """Whether it is a folder of this user, which nobody else can write."""
    own_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return own_folder and not status.st_mode & 0o022
