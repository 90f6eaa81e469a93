"""Starts ranks that measure the links between them.  Imports no torch: the ranks do."""

from __future__ import annotations

from typing import Literal

from shardmark.core.errors import InputError
from shardmark.core.scratch import scratch_folder
from shardmark.measure.system.child import run_module
from shardmark.results.network import NetworkRecord

RECORD_FILE = "record.json"
DEFAULT_SECONDS = 8.0
MOST_RANKS = 256
GRACE_SECONDS = 90.0
"""For imports, the connection of all ranks, and sizes that take longer than expected."""
Device = Literal["auto", "cuda", "cpu"]


def probe_network(
    ranks: int = 2,
    *,
    device: Device = "auto",
    seconds: float = DEFAULT_SECONDS,
    threads: int | None = None,
) -> NetworkRecord:
    """Measure the links between so many ranks on this machine; without fits.

    `seconds` is what the timings take; starting the ranks comes on top, and with `threads` what
    ranks compute with so many of a CPU.  No rank is left when it
    returns or raises.  Raises `ShardmarkError` with what a rank said that failed.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise InputError("--ranks", f"found {ranks}", f"allowed are 1 to {MOST_RANKS}")
    with scratch_folder() as folder:
        run_module(
            "shardmark.measure.network.links",
            *(str(folder), str(ranks), device, str(seconds)),
            *(() if threads is None else (str(threads),)),
            title="the ranks",
            limit_seconds=seconds + GRACE_SECONDS,
        )
        return NetworkRecord.model_validate_json((folder / RECORD_FILE).read_bytes())
