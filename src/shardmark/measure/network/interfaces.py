"""What passed over each interface of this machine: the kernel's, InfiniBand's ports, NVLink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from shardmark.measure.kernel_files import read_kernel_file

INFINIBAND_WORD_BYTES = 4
"""The unit of a port's counters."""
IP_OVER_INFINIBAND = "32"
"""The kernel's type of an interface whose bytes its port counts, too."""
NVLINK = "nvlink"
"""Stands among the interfaces for all NVLinks of the devices in use."""


def network_counters(system: Path = Path("/sys/class")) -> dict[str, dict[str, int]]:
    """Bytes by interface since the machine started, counters that wrapped around put right.

    InfiniBand's and RoCE's ports are among them, as `mlx5_0 port 1`: what passes by RDMA, no
    interface counts.
    """
    import psutil

    ports = infiniband_counters(system / "infiniband")
    return ports | {
        name: {"bytes_sent": counters.bytes_sent, "bytes_received": counters.bytes_recv}
        for name, counters in psutil.net_io_counters(pernic=True).items()
        if not ports or read_kernel_file(system / "net" / name / "type") != IP_OVER_INFINIBAND
    }


def infiniband_counters(folder: Path) -> dict[str, dict[str, int]]:
    """Bytes by port, where the kernel counts them."""
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
    gpus: Sequence[Mapping[str, object]], answered: set[object]
) -> dict[str, dict[str, int]]:
    """Over the NVLinks of all these devices together; nothing where NVML does not count.

    `answered` grows by those that tell.  Where one of them does not any more, nothing is told: the
    sum would seem to fall.
    """
    told = {}
    for gpu in gpus:
        sent, received = gpu.get("nvlink_sent_bytes"), gpu.get("nvlink_received_bytes")
        if isinstance(sent, int) and isinstance(received, int):
            told[gpu["uuid"]] = sent, received
    answered.update(told)
    if not told or answered != told.keys():
        return {}
    sums = [sum(counts) for counts in zip(*told.values(), strict=True)]
    return {NVLINK: dict(zip(("bytes_sent", "bytes_received"), sums, strict=True))}
