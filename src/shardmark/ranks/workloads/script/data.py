"""Checks that a script exists.  Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardmark.scripts.command import check_exists

if TYPE_CHECKING:
    from shardmark.ranks.workloads.script.options import ScriptOptions


def check(options: ScriptOptions) -> None:
    """Raise `InputError` for a command without a script that exists."""
    check_exists(options.parsed())


def paths(options: ScriptOptions) -> tuple[Path, ...]:  # noqa: ARG001  (one signature)
    """Return no paths: only the script knows its data."""
    return ()
