"""Finds a user's data without importing the task.  Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardmark.ranks.workloads.own.options import OwnOptions


def check(options: OwnOptions) -> None:  # noqa: ARG001  (one signature)
    """Return None: only ranks can count the samples, since creating the task imports torch."""
    return


def paths(options: OwnOptions) -> tuple[Path, ...]:
    """Values of `options` that are paths of existing files or folders."""
    texts = [value for value in options.options.values() if isinstance(value, str) and value]
    return tuple(path for path in map(_path, texts) if path is not None)


def _path(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):
        return None  # not a valid path
