"""The folder `runs/`: where new runs go, and which is the latest."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from shardmark.core.errors import InputError
from shardmark.core.storage import storage_error

RUNS = Path("runs")
LATEST = "latest"
LOCK_FILE = ".lock"
"""Locked in a run's folder while a command measures into it."""


def fresh_folder(name: str) -> Path:
    """`runs/NAME`, or `runs/NAME-2` and so on; made at once, so that no other command takes it."""
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
def removed_if_empty(folder: Path | None) -> Iterator[None]:
    """Leave no folder that was made for a run of which nothing came."""
    try:
        yield
    finally:
        if folder is not None:
            with suppress(OSError):
                folder.rmdir()


def runs_of(name: str) -> list[Path]:
    """The folders that `fresh_folder` made for runs of that name, the newest first."""
    ours = re.compile(rf"{re.escape(name)}(-\d+)?")
    runs = [path for path in RUNS.glob(f"{name}*") if ours.fullmatch(path.name) and path.is_dir()]
    return sorted(runs, key=lambda path: path.stat().st_mtime, reverse=True)


def measured_now() -> list[Path]:
    """The folders in `runs/` that commands of this machine measure into now.

    Takes no lock: a command that starts at this moment would fail.
    """
    with suppress(OSError):
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        inodes = {words[-3].rpartition(":")[2] for words in locks if "FLOCK" in words}
        files = [path for path in RUNS.glob(f"*/{LOCK_FILE}") if not path.parent.is_symlink()]
        return [path.parent for path in files if str(path.stat().st_ino) in inodes]
    return []


def point_latest_to(folder: Path) -> None:
    """Have `runs/latest` lead to a run in `runs/`; a run elsewhere changes nothing."""
    if folder.absolute().parent != RUNS.absolute() or folder.name == LATEST:
        return
    link, new_link = RUNS / LATEST, RUNS / f".{LATEST}-{os.getpid()}"
    with suppress(OSError):  # no symbolic links here, or a folder of that name: not worth a run
        new_link.unlink(missing_ok=True)
        new_link.symlink_to(folder.name)
        new_link.replace(link)
    with suppress(OSError):
        new_link.unlink(missing_ok=True)


def latest_run() -> Path:
    """The newest run in `runs/`.  Raises `InputError` where there is none."""
    link = RUNS / LATEST
    if not (link.is_symlink() and link.is_dir()):
        raise InputError(
            "RUN",
            f"none is given, and {link} leads to no run",
            "name a run's folder, or make one: shardmark run quickstart",
        )
    return RUNS / link.readlink()
