"""What is known of a task's data before its class is imported: nothing.  Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardmark.workloads.own.options import OwnOptions


def check(options: OwnOptions) -> None:  # noqa: ARG001  (one signature)
    """The ranks count the samples: making the task here would import torch."""
    return


def paths(options: OwnOptions) -> tuple[Path, ...]:
    """Options that name something on the disk: they are part of what was trained."""
    texts = [value for value in options.options.values() if isinstance(value, str) and value]
    return tuple(path for path in map(_path, texts) if path is not None)


def _path(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):
        return None  # no name of a file
