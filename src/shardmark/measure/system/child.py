"""Runs one of our modules in a process of its own, for what may hang or crash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

from shardmark.core.errors import ShardmarkError


def run_module(module: str, *arguments: str, title: str, limit_seconds: float) -> None:
    """Run `python -P -m MODULE ARGUMENTS`; none of its processes is left when it returns or raises.

    Raises `ShardmarkError` with the last line that it said where it fails or takes longer.
    """
    started = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        _, said = started.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        raise ShardmarkError(f"{title} were not done after {limit_seconds:.0f} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)  # what it has started, too
        started.communicate()
    if started.returncode:
        last = said.strip().splitlines()[-1:] or [f"exit code {started.returncode}, and no word"]
        raise ShardmarkError(f"{title} failed: {last[0]}")
