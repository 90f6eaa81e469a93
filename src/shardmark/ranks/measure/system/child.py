"""Runs a module of this package in a separate process: what it does may hang or crash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

from shardmark.base.errors import ShardmarkError


def run_module(module: str, *arguments: str, title: str, limit_seconds: float) -> None:
    """Run `python -P -m MODULE ARGUMENTS`.  None of its processes is left at the end.

    Raises `ShardmarkError` if it takes longer than `limit_seconds`, or if it fails, with the last
    line of its standard error.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        _, stderr = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        raise ShardmarkError(f"{title} did not finish within {limit_seconds:.0f} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its child processes, too
        process.communicate()
    if process.returncode:
        last = stderr.strip().splitlines()[-1:] or [
            f"exit code {process.returncode}, without a message"
        ]
        raise ShardmarkError(f"{title} failed: {last[0]}")
