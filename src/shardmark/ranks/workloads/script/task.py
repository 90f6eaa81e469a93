"""Runs a training script as Python would run it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from shardmark.base.errors import InputError
from shardmark.base.masking import masked_command

if TYPE_CHECKING:
    from shardmark.ranks.workloads.script.options import ScriptOptions


def build(options: ScriptOptions, seed: int) -> NoReturn:  # noqa: ARG001  (one signature)
    """Raise `InputError`: a script shows neither its model nor its data."""
    raise InputError(
        f"workload script ({masked_command(options.command)})",
        "a script trains by itself: its model and its data are not known",
        "allowed are run, time, compare, report and export; or write a task (`shardmark init`)",
    )


def run_as_main(options: ScriptOptions) -> None:
    """Run the script in this process, as `__main__` and with its arguments."""
    script, *arguments = options.parsed().script
    if script == "-m":
        module, *arguments = arguments
        sys.argv = [module, *arguments]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        path = Path(script).expanduser()
        sys.argv = [script, *arguments]
        sys.path.insert(0, str(path.resolve().parent))
        runpy.run_path(str(path), run_name="__main__")
