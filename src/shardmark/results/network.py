"""What the links between ranks can do, as measured: `network.json` of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from shardmark.core.errors import InputError
from shardmark.results.files import read_if_there, write_model
from shardmark.results.schema import Stored

NETWORK_FILE = "network.json"

Operation = Literal["point_to_point", "all_reduce", "all_gather", "reduce_scatter"]
Reach = Literal["same_host", "between_hosts"]


class Bounds(Stored):
    """A fitted value and its 95 % interval."""

    value: float
    low: float | None
    """None where the measurements do not bound it."""
    high: float | None


class LinkFit(Stored):
    """Latency and bandwidth of one link under the operation's model."""

    latency_seconds: Bounds
    """Of one message."""
    bytes_per_second: Bounds
    """One way, of one rank's link."""
    residual: float
    """Standard deviation of log(measured / model): 0.1 is about 10 %."""


class TimedSize(Stored):
    """All timings of one operation with one size."""

    payload_bytes: int
    """The whole tensor: reduced, gathered together, or to be scattered."""
    seconds: tuple[float, ...]
    """Of one call on the slowest rank, one value a round; half a round trip point to point."""


class MeasuredOperation(Stored):
    """One operation over all its sizes."""

    operation: Operation
    reach: Reach
    """Whether its ranks sit on one host."""
    ranks: tuple[int, ...]
    sizes: tuple[TimedSize, ...]
    fit: LinkFit | None = None
    reason: str | None = None
    """Why there is no fit."""


class RankSpeed(Stored):
    """What a rank computes with its share of a machine, the best of some tries."""

    flops_per_second: Mapping[str, float]
    """Of products of matrices, by precision."""
    memory_bytes_per_second: float
    """Read and written."""
    operation_seconds: float | None = None
    """Of starting one operation of a training step.  None before it was measured."""
    shared: float = 1.0
    """What ranks keep of it while all compute, their mean: they may share cores."""


class NetworkRecord(Stored):
    """The links between the ranks of one process group."""

    schema_version: Literal[1] = 1
    measured_at_seconds: float
    """Unix time."""
    backend: str
    device_type: Literal["cpu", "cuda"]
    hosts: tuple[str, ...]
    """By rank."""
    interface: str | None
    """That the user or the launcher chose for the backend; None where the library chose."""
    torch: str
    """Its version."""
    operations: tuple[MeasuredOperation, ...]
    speed: RankSpeed | None = None
    """Where that was asked for."""

    @property
    def world_size(self) -> int:
        return len(self.hosts)


def write_network(folder: Path, record: NetworkRecord) -> None:
    """Store the record with the run of that folder; an older one is replaced."""
    write_model(folder / NETWORK_FILE, record)


def read_network(folder: Path) -> NetworkRecord | None:
    """The stored record; None where there is none.  `InputError` for one that cannot be read."""
    path = folder / NETWORK_FILE
    try:
        return read_if_there(NetworkRecord, path)
    except ValueError as error:
        remedy = "measure again with `shardmark doctor --network`"
        raise InputError(str(path), str(error), remedy) from None
