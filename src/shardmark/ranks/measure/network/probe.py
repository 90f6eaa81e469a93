"""Starts ranks that measure the links between them.  Only the ranks import torch."""

from __future__ import annotations

from typing import Literal

from shardmark.base.errors import InputError
from shardmark.base.files.scratch import scratch_folder
from shardmark.base.results.network import NetworkRecord
from shardmark.ranks.measure.system.child import run_module

RECORD_FILE = "record.json"
DEFAULT_SECONDS = 8.0
MOST_RANKS = 256
GRACE_SECONDS = 90.0
"""Time for imports, for connecting the ranks, and for sizes that take longer than expected."""
Device = Literal["auto", "cuda", "cpu"]


def probe_network(
    ranks: int = 2,
    *,
    device: Device = "auto",
    seconds: float = DEFAULT_SECONDS,
    threads: int | None = None,
) -> NetworkRecord:
    """Measure the links between so many ranks on this machine; the record has no fits yet.

    The timings take about `seconds`, without the start of the ranks.  With `threads`, the speed at
    which ranks compute with that many CPU threads is measured too.  No rank is left when the
    function returns or raises.  Raises `ShardmarkError` with the message of a rank that failed.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise InputError("--ranks", f"found {ranks}", f"allowed are 1 to {MOST_RANKS}")
    with scratch_folder() as folder:
        run_module(
            "shardmark.ranks.measure.network.links",
            *(str(folder), str(ranks), device, str(seconds)),
            *(() if threads is None else (str(threads),)),
            title="the ranks",
            limit_seconds=seconds + GRACE_SECONDS,
        )
        return NetworkRecord.model_validate_json((folder / RECORD_FILE).read_bytes())
