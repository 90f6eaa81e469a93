"""Temporary folders that are removed when their owner ends, even if it is killed."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from shardmark.base.files.storage import temporary_folder

PREFIX = "shardmark-scratch-"
PLACES = (Path("/tmp"), Path("/var/tmp"))
"""Folders for temporary files besides that of the environment."""


def lock_file() -> str:
    """Return the name of a folder's lock file, which is locked while the folder's owner lives.

    A lock, unlike a process ID, is valid across PID namespaces.  The name holds a hash of the host
    name, because locks are not visible on other hosts.
    """
    return f"owner-{hashlib.sha256(platform.node().encode()).hexdigest()[:8]}.lock"


def lock_folder(folder: Path) -> int:
    """Protect the folder from `remove_if_abandoned`, and return the descriptor of the lock.

    The protection lasts while this process or one forked from it keeps the descriptor open.
    Raises `OSError` if the file system has no locks; no other process removes the folder then.
    """
    import fcntl  # Windows has none

    lock = folder / lock_file()
    part = lock.with_suffix(".part")
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        part.rename(lock)  # other processes never see the file unlocked
    except OSError:
        part.unlink(missing_ok=True)
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def scratch_folder(*, away_from: Path | None = None) -> Iterator[Path]:
    """Create a temporary folder, and remove it at the end of the context.

    If possible, the folder is not inside of the current one, and not below the folder of the root
    that `away_from` is in.  If this process is killed, the next process that calls this function
    removes the folder.
    """
    folder, lock = create_scratch(away_from)
    try:
        yield folder
    finally:
        remove_tree(folder)
        if lock is not None:
            os.close(lock)


def create_scratch(away_from: Path | None = None) -> tuple[Path, int | None]:
    """Create a folder that others remove after the end of this process and those forked from it.

    Returns it with its lock; None if the file system has no locks.
    """
    remove_abandoned_scratch()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_place(away_from)))
    try:
        return folder, lock_folder(folder)
    except OSError:
        return folder, None


def _place(away_from: Path | None) -> Path:
    """Return the folder in which a scratch folder is made."""
    temporary = temporary_folder()
    for place in (temporary, *PLACES):
        path = place.resolve()
        if away_from is None:
            is_away = not path.is_relative_to(Path.cwd())  # a script may empty its folder
        else:
            is_away = path.parts[:2] != away_from.resolve().parts[:2]
        if is_away and os.access(place, os.W_OK):
            return place
    return temporary


def remove_tree(folder: Path) -> None:
    """Remove a folder as far as possible, with what its owner may not read."""

    def open_and_retry(function: Callable[[str], object], path: str, _: object) -> None:
        with suppress(OSError):
            os.chmod(path, stat.S_IRWXU)  # noqa: PTH101 - no link is followed by rmtree
            if function is not os.unlink:
                shutil.rmtree(path, ignore_errors=True)

    shutil.rmtree(folder, onerror=open_and_retry)
    shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned_scratch() -> None:
    """Remove this user's scratch folders whose owners on this machine have been killed."""
    for place in {temporary_folder(), *PLACES}:
        for folder in place.glob(f"{PREFIX}*"):
            remove_if_abandoned(folder)


def remove_if_abandoned(folder: Path) -> None:
    """Remove this user's folder if its owner on this machine is dead and its time has passed."""
    import fcntl  # Windows has none

    with suppress(OSError), ExitStack() as stack:  # used, already removed, or without a lock
        # Every access uses this descriptor, so a new folder of the same name is never touched.
        inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        stack.callback(os.close, inside)
        if not is_private(os.fstat(inside)):
            return
        lock = os.open(lock_file(), os.O_RDWR | os.O_NOFOLLOW, dir_fd=inside)
        stack.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with os.scandir(inside) as entries:
            for entry in [*entries]:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.name, dir_fd=inside)
                elif entry.name != lock_file():
                    os.unlink(entry.name, dir_fd=inside)
        os.unlink(lock_file(), dir_fd=inside)  # last, so that an interrupted removal can go on
        folder.rmdir()


def is_private(status: os.stat_result) -> bool:
    """Return whether this is a folder of this user that no other user can write to."""
    is_folder_of_user = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return is_folder_of_user and not status.st_mode & 0o022
