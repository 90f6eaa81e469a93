"""Starts ranks that measure the links between them.  Imports no torch: the ranks do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Literal

from shardmark.core.errors import InputError, ShardmarkError
from shardmark.core.storage import temporary_folder
from shardmark.results.network import NetworkRecord

RECORD_FILE = "record.json"
DEFAULT_SECONDS = 8.0
MOST_RANKS = 256
GRACE_SECONDS = 90.0
"""For imports, the connection of all ranks, and sizes that take longer than expected."""
Device = Literal["auto", "cuda", "cpu"]


def probe_network(
    ranks: int = 2, *, device: Device = "auto", seconds: float = DEFAULT_SECONDS
) -> NetworkRecord:
    """Measure the links between so many ranks on this machine; without fits.

    `seconds` is what the timings take; starting the ranks comes on top.  No rank is left when it
    returns or raises.  Raises `ShardmarkError` with what a rank said that failed.
    """
    if not 2 <= ranks <= MOST_RANKS:
        raise InputError("--ranks", f"found {ranks}", f"allowed are 2 to {MOST_RANKS}")
    words = [sys.executable, "-P", "-m", "shardmark.measure.network.links"]
    with tempfile.TemporaryDirectory(prefix="shardmark-network-", dir=temporary_folder()) as name:
        words += [name, str(ranks), device, str(seconds)]
        started = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            _, said = started.communicate(timeout=seconds + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            raise ShardmarkError(
                f"the ranks were not done after {seconds + GRACE_SECONDS:.0f} s"
            ) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)  # the ranks, too
            started.communicate()
        if started.returncode:
            last = said.strip().splitlines()[-1:] or ["it said nothing"]
            raise ShardmarkError(f"a rank failed: {last[0]}")
        return NetworkRecord.model_validate_json((Path(name) / RECORD_FILE).read_bytes())
