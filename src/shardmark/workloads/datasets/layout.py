"""Data sets that torchvision reads from its own layout.  Imports torch only in `read_splits`."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmark.core.errors import DataError

if TYPE_CHECKING:
    from shardmark.workloads.vision.options import ClassificationOptions


def missing_files(folder: Path, files: Sequence[str]) -> list[str]:
    return [name for name in files if not (folder / name).is_file()]


def check_layout(options: ClassificationOptions, files: Sequence[str]) -> None:
    """Raise `DataError` that names what is missing, unless it may be downloaded."""
    missing = missing_files(options.folder, files)
    if not missing or options.download:
        return
    what = f"no {', '.join(missing)}" if options.folder.is_dir() else "no such folder"
    raise DataError(
        str(options.folder),
        f"{what} for {options.dataset}",
        f"expected {', '.join(files)} in data_dir; `download: true` fetches them",
    )


def read_splits(
    options: ClassificationOptions, kind: Callable[..., Any], files: Sequence[str]
) -> tuple[Any, Any]:
    """torchvision's training and test set of that kind, downloaded first where that is allowed."""
    check_layout(options, files)
    folder = options.folder
    try:
        if missing_files(folder, files):
            with _one_process_at_a_time(folder):
                kind(root=folder, train=True, download=True)
        return kind(root=folder, train=True), kind(root=folder, train=False)
    except (RuntimeError, OSError, ValueError, AssertionError, EOFError) as error:
        raise DataError(
            str(folder),
            f"{options.dataset} cannot be read or downloaded ({error})",
            f"remove broken files; expected {', '.join(files)}; `download: true` fetches them",
        ) from error


@contextmanager
def _one_process_at_a_time(folder: Path) -> Iterator[None]:
    """The ranks of a machine start together, and one download is enough."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".shardmark-download.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
