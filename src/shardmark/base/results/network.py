"""Measured latencies and bandwidths of the links between ranks: `network.json` of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from shardmark.base.errors import InputError
from shardmark.base.files.stored import Stored
from shardmark.base.results.files import read_if_exists, write_model

NETWORK_FILE = "network.json"

Operation = Literal["point_to_point", "all_reduce", "all_gather", "reduce_scatter"]
Reach = Literal["same_host", "between_hosts"]


class Bounds(Stored):
    """A fitted value and its 95 % interval."""

    value: float
    low: float | None
    """None if the measurements give no bound."""
    high: float | None


class LinkFit(Stored):
    """Latency and bandwidth of a link, fitted with the cost model of the operation."""

    latency_seconds: Bounds
    """Latency of a message."""
    bytes_per_second: Bounds
    """Bandwidth of a rank's link in one direction."""
    residual: float
    """Standard deviation of log(measured / model): 0.1 is about 10 %."""


class TimedSize(Stored):
    """Timings of an operation for one message size."""

    payload_bytes: int
    """Bytes of the full tensor that is reduced, gathered or scattered."""
    seconds: tuple[float, ...]
    """Time of a call on the slowest rank in each round; half a round trip for point to point."""


class MeasuredOperation(Stored):
    """An operation with all its message sizes."""

    operation: Operation
    reach: Reach
    """Scope of the group: ranks of one host, or of several hosts."""
    ranks: tuple[int, ...]
    sizes: tuple[TimedSize, ...]
    fit: LinkFit | None = None
    reason: str | None = None
    """Reason for a missing fit."""


class RankSpeed(Stored):
    """Speed of a rank with its share of the machine, as the best of several measurements."""

    flops_per_second: Mapping[str, float]
    """Speed of matrix products, by precision."""
    memory_bytes_per_second: float
    """Bytes read and written."""
    operation_seconds: float | None = None
    """Overhead of starting an operation; None in files of earlier versions."""
    shared: float = 1.0
    """Mean fraction of its speed that a rank reaches while all ranks compute."""


class NetworkRecord(Stored):
    """Measurements of the links between the ranks of a process group."""

    schema_version: Literal[1] = 1
    measured_at_seconds: float
    """Unix time."""
    backend: str
    device_type: Literal["cpu", "cuda"]
    hosts: tuple[str, ...]
    """Host names, by rank."""
    interface: str | None
    """Network interface that the user or the launcher set; None if the library chose one."""
    torch: str
    """Version of torch."""
    operations: tuple[MeasuredOperation, ...]
    speed: RankSpeed | None = None
    """None if the speed was not measured."""

    @property
    def world_size(self) -> int:
        return len(self.hosts)


def write_network(folder: Path, record: NetworkRecord) -> None:
    """Store the record in the folder of a run, and replace an earlier one."""
    write_model(folder / NETWORK_FILE, record)


def read_network(folder: Path) -> NetworkRecord | None:
    """Read the record of a run, or return None.  Raises `InputError` if it cannot be read."""
    path = folder / NETWORK_FILE
    try:
        return read_if_exists(NetworkRecord, path)
    except ValueError as error:
        remedy = "measure again with `shardmark doctor --network`"
        raise InputError(str(path), str(error), remedy) from None
