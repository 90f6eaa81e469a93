"""Counters of bytes and errors of this machine's interfaces, InfiniBand ports and NVLinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from shardmark.base.files.run_files import NVLINK
from shardmark.ranks.measure.kernel_files import read_kernel_file

INFINIBAND_WORD_BYTES = 4
"""The unit in which an InfiniBand port counts."""
IP_OVER_INFINIBAND = "32"
"""The kernel's type of IP-over-InfiniBand interfaces, whose bytes their port counts as well."""


def network_counters(system: Path = Path("/sys/class")) -> dict[str, dict[str, int]]:
    """Counts by interface since the machine started, corrected where a counter wrapped around.

    `errors` counts packets that an interface could not send or receive, or dropped.
    Ports of InfiniBand and RoCE are included, as `mlx5_0 port 1`: no interface counts RDMA traffic.
    """
    import psutil

    ports = infiniband_counters(system / "infiniband")
    return ports | {
        name: {
            "bytes_sent": counters.bytes_sent,
            "bytes_received": counters.bytes_recv,
            "errors": counters.errin + counters.errout + counters.dropin + counters.dropout,
        }
        for name, counters in psutil.net_io_counters(pernic=True).items()
        if not ports or read_kernel_file(system / "net" / name / "type") != IP_OVER_INFINIBAND
    }


def infiniband_counters(folder: Path) -> dict[str, dict[str, int]]:
    """Bytes by port of InfiniBand or RoCE, where the kernel counts them."""
    counters: dict[str, dict[str, int]] = {}
    for port in sorted(folder.glob("*/ports/*")):
        sent, received = (
            read_kernel_file(port / "counters" / name)
            for name in ("port_xmit_data", "port_rcv_data")
        )
        if sent.isdecimal() and received.isdecimal():
            counters[f"{port.parents[1].name} port {port.name}"] = {
                "bytes_sent": INFINIBAND_WORD_BYTES * int(sent),
                "bytes_received": INFINIBAND_WORD_BYTES * int(received),
            }
    return counters


def nvlink_counters(
    gpus: Sequence[Mapping[str, object]], counting_uuids: set[object]
) -> dict[str, dict[str, int]]:
    """Bytes over the NVLinks of all these devices together; empty where NVML does not count them.

    Devices that report a count are added to `counting_uuids`.  The result is empty as soon as one
    of them reports none, since the sum would seem to fall.
    """
    bytes_by_uuid = {}
    for gpu in gpus:
        sent, received = gpu.get("nvlink_sent_bytes"), gpu.get("nvlink_received_bytes")
        if isinstance(sent, int) and isinstance(received, int):
            bytes_by_uuid[gpu["uuid"]] = sent, received
    counting_uuids.update(bytes_by_uuid)
    if not bytes_by_uuid or counting_uuids != bytes_by_uuid.keys():
        return {}
    sums = [sum(counts) for counts in zip(*bytes_by_uuid.values(), strict=True)]
    return {NVLINK: dict(zip(("bytes_sent", "bytes_received"), sums, strict=True))}
