"""Starts ranks that measure the links between them.  Imports no torch: the ranks do."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from shardmark.core.errors import InputError, ShardmarkError
from shardmark.results.network import NetworkRecord

DEVICE_VARIABLE = "SHARDMARK_PROBE_DEVICE"
SECONDS_VARIABLE = "SHARDMARK_PROBE_SECONDS"
MEETING_FILE = "meeting"
RECORD_FILE = "record.json"
DEFAULT_SECONDS = 8.0
MOST_RANKS = 256
GRACE_SECONDS = 90.0
"""For imports, the connection of all ranks, and sizes that take longer than expected."""
POLL_SECONDS = 0.05
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
    with tempfile.TemporaryDirectory(prefix="shardmark-network-") as name:
        folder = Path(name)
        started: list[subprocess.Popen[bytes]] = []
        try:
            started += (_start(rank, ranks, folder, device, seconds) for rank in range(ranks))
            _wait(started, folder, seconds + GRACE_SECONDS)
        finally:
            for process in started:
                process.kill()
                process.wait()
        return NetworkRecord.model_validate_json((folder / RECORD_FILE).read_bytes())


def _start(
    rank: int, ranks: int, folder: Path, device: Device, seconds: float
) -> subprocess.Popen[bytes]:
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        DEVICE_VARIABLE: device,
        SECONDS_VARIABLE: str(seconds),
    }
    # Else gloo asks for the host's name, which may not resolve.
    defaults = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "shardmark.measure.network.network_ranks", str(folder)],
            env={**defaults, **os.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _wait(started: Sequence[subprocess.Popen[bytes]], folder: Path, seconds: float) -> None:
    """Until all have ended well; `ShardmarkError` for the first that has not."""
    deadline = time.monotonic() + seconds
    while True:
        codes = [process.poll() for process in started]
        for rank, code in enumerate(codes):
            if code:
                log = (folder / f"{rank}.log").read_text(errors="replace").strip().splitlines()
                said = log[-1] if log else "it said nothing"
                raise ShardmarkError(f"rank {rank} ended with exit code {code}: {said}")
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise ShardmarkError(f"the ranks were not done after {seconds:.0f} s")
        time.sleep(POLL_SECONDS)
