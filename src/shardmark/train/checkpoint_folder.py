"""Where a node keeps a trial's checkpoints while it runs.  Imports no torch."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from shardmark.core.environment_variables import FOLDER_VARIABLE
from shardmark.core.errors import FULL, InputError, StorageError
from shardmark.core.scratch import is_private, lock_folder, remove_if_abandoned
from shardmark.core.storage import temporary_folder
from shardmark.trials.trial import Trial

DEFAULT = "checkpoints"
"""In the trial's folder, which is cleared when the trial has ended."""
ABSENT_FILE = "absent"
"""The rank died while the others trained on: its last checkpoint may be older than theirs."""
_MADE = re.compile(r"(?:rank|node)-\d+|shardmark-(.+)-([0-9a-f]{12})")
"""Folders that nobody but us has to do with."""


def rank_folder(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"


def folder_of_rank(directory: Path) -> Path:
    """Where this process writes, of a trial in that folder."""
    return Path(os.environ.get(FOLDER_VARIABLE) or directory / DEFAULT)


def folder_on_node(trial: Trial, run_directory: str, node: int, *, here: bool) -> Path | None:
    """Where that node keeps them, the same for a process that takes its place; None without any.

    `run_directory` is the trial's folder on the controller's machine, which `here` is.
    """
    if not trial.limits.max_restarts:
        return None
    given = trial.limits.checkpoint_dir
    if given is None and here:
        return Path(run_directory) / DEFAULT
    base = temporary_folder() if given is None else Path(given).expanduser()
    return base / f"shardmark-{trial.id}-{_digits(run_directory)}" / f"node-{node}"


def _digits(run_directory: str) -> str:
    return hashlib.sha256(run_directory.encode()).hexdigest()[:12]


def check_writable(folder: Path) -> None:
    """Make the folder; raise `InputError` unless files can be made there, and by nobody else.

    Its name can be foreseen, and folders for temporary files are everybody's.
    """
    try:
        for wanted in (*reversed(folder.parents), folder):
            if not wanted.exists():
                wanted.mkdir(mode=0o700, exist_ok=True)
        for made in takewhile(lambda path: _MADE.fullmatch(path.name), (folder, *folder.parents)):
            if not is_private(made.lstat()):
                raise not_writable(folder, OSError(f"{made} is another user's, or open to others"))
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise not_writable(folder, error) from error


def not_writable(folder: Path, error: BaseException) -> InputError:
    """What to say of a folder for checkpoints that cannot be used."""
    why = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
    full = getattr(error, "errno", None) in FULL
    return (StorageError if full else InputError)(
        "limits.checkpoint_dir",
        f"{folder} on {platform.node()} cannot be written: {why or type(error).__name__}",
        "give a folder with room that every node can write, or none",
    )


def check_given(trials: Iterable[Trial]) -> None:
    """Raise `InputError` for a `checkpoint_dir` that this machine cannot write."""
    wanted = {t.limits.checkpoint_dir for t in trials if t.limits.max_restarts}
    for given in sorted(wanted - {None}, key=str):
        check_writable(Path(str(given)).expanduser())


def keep(folder: Path, trial: Trial) -> None:
    """Have no other run remove a node's folder while this process, or one forked from it, lives.

    Nor while the trial may wait for a process in the node's place.
    """
    limits = trial.limits
    until_seconds = time.time() + limits.trial_seconds if limits.node_return_seconds else 0.0
    if folder.name != DEFAULT:  # in a run's folder, which nobody else looks into
        with suppress(OSError, InputError):  # the ranks meet the same, and tell it
            check_writable(folder)
            lock_folder(folder, until_seconds)


def remove(folder: Path | None) -> None:
    """Remove a node's folder, and the trial's when it was the last."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # other nodes have theirs there, or it never was
            if folder.name != DEFAULT:
                folder.parent.rmdir()


def remove_abandoned(folder: Path | None, run_directory: str) -> None:
    """Remove a node's folder, and those of the run's other trials in which it was killed.

    And those of other runs that nobody owns.  One command at a time measures a run, one trial
    after another.
    """
    if folder is None or folder.name == DEFAULT:
        remove(folder)
        return
    base = folder.parent.parent
    for other, named in _made_in(base, folder.name):
        if named[2] == _digits(str(Path(run_directory).with_name(named[1]))):
            remove(other)
    remove_unowned(base)


def remove_unowned(base: Path) -> None:
    """Remove nodes' folders below whose owners are dead, of whatever run, if of no more use."""
    for folder, _ in _made_in(base, "node-*"):
        remove_if_abandoned(folder)
        with suppress(OSError):  # other nodes have theirs there
            folder.parent.rmdir()


def _made_in(base: Path, node: str) -> Iterator[tuple[Path, re.Match[str]]]:
    """Nodes' folders of this user's trials, and what those trials' folders are named."""
    for trial in base.glob("shardmark-*"):
        named = _MADE.fullmatch(trial.name)
        with suppress(FileNotFoundError):  # gone meanwhile
            if named and is_private(trial.lstat()):
                yield from [(folder, named) for folder in trial.glob(node)]
