"""Checks that a script exists.  Imports no torch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from shardmark.base.errors import InputError
from shardmark.ranks.workloads.models import find_without_import, looked_in

if TYPE_CHECKING:
    from shardmark.ranks.workloads.script.options import ScriptOptions
    from shardmark.scripts.command import ScriptCommand


def check(options: ScriptOptions) -> None:
    """Raise `InputError` for a command without a script that exists."""
    check_exists(options.parsed())


def check_exists(command: ScriptCommand) -> None:
    """Raise `InputError` if the command's script or module does not exist."""
    first, *rest = command.script
    if first == "-m":
        exists, problem = find_without_import(rest[0]) is not None, f"no module {rest[0]!r}"
    else:
        exists = Path(first).expanduser().is_file() or shutil.which(first) is not None
        problem = f"no file {first!r}{looked_in(first)}"
    if not exists:
        raise InputError(f"command {command.text!r}", problem, "give the script's path")


def paths(options: ScriptOptions) -> tuple[Path, ...]:  # noqa: ARG001  (one signature)
    """Return no paths: only the script knows its data."""
    return ()
