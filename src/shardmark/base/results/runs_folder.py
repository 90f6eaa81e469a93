"""The folder `runs/`: names of new runs, and the link to the latest run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from shardmark.base.errors import InputError
from shardmark.base.files.storage import storage_error

RUNS = Path("runs")
LATEST = "latest"
LOCK_FILE = ".lock"
"""Locked in a run's folder while a command measures into it."""


def create_run_folder(name: str) -> Path:
    """Create `runs/NAME`, or `runs/NAME-2` and so on if the name is taken."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    for folder in (RUNS / new for new in names if new != LATEST):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise storage_error(folder, error) from error
        return folder
    raise AssertionError("numbers do not end")


@contextmanager
def run_folder(out: Path | None, name: str) -> Iterator[Path]:
    """Yield `out`, or a new folder of that name that is removed at the end if it is empty."""
    folder = create_run_folder(name) if out is None else out
    try:
        yield folder
    finally:
        if out is None:
            with suppress(OSError):
                folder.rmdir()


def runs_named(name: str) -> list[Path]:
    """Return the folders that `create_run_folder` created for this name, newest first."""
    pattern = re.compile(rf"{re.escape(name)}(-\d+)?")
    runs = [path for path in RUNS.glob(f"{name}*") if pattern.fullmatch(path.name)]
    runs = [path for path in runs if path.is_dir()]
    return sorted(runs, key=lambda path: path.stat().st_mtime, reverse=True)


def folders_in_use() -> list[Path]:
    """Return the folders in `runs/` into which commands on this machine measure at present.

    Takes no lock, because a command that starts at the same time would fail.
    """
    with suppress(OSError):
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        inodes = {words[-3].rpartition(":")[2] for words in locks if "FLOCK" in words}
        files = [path for path in RUNS.glob(f"*/{LOCK_FILE}") if not path.parent.is_symlink()]
        return [path.parent for path in files if str(path.stat().st_ino) in inodes]
    return []


def point_latest_to(folder: Path) -> None:
    """Point `runs/latest` to a run in `runs/`; has no effect for a run elsewhere."""
    if folder.absolute().parent != RUNS.absolute() or folder.name == LATEST:
        return
    link, new_link = RUNS / LATEST, RUNS / f".{LATEST}-{os.getpid()}"
    with suppress(OSError):  # the file system has no links, or a folder has this name
        new_link.unlink(missing_ok=True)
        new_link.symlink_to(folder.name)
        new_link.replace(link)
    with suppress(OSError):
        new_link.unlink(missing_ok=True)


def latest_run() -> Path:
    """Return the latest run in `runs/`.  Raises `InputError` if there is none."""
    link = RUNS / LATEST
    if not (link.is_symlink() and link.is_dir()):
        raise InputError(
            "RUN",
            f"none is given, and {link} leads to no run",
            "name a run's folder, or make one: shardmark run quickstart",
        )
    return RUNS / link.readlink()
