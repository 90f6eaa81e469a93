"""InfiniBand's ports and NVLink stand among the interfaces, and no byte counts twice."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import psutil

from shardmark.ranks.measure.network.interfaces import network_counters, nvlink_counters

if TYPE_CHECKING:
    import pytest


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_traffic_of_infiniband_ports_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IP over InfiniBand passes its port, which counts it already."""
    names = ("eth0", "ib0")
    lost = {"errin": 1, "errout": 2, "dropin": 3, "dropout": 4}
    counters = {name: SimpleNamespace(bytes_sent=1, bytes_recv=2, **lost) for name in names}
    monkeypatch.setattr(psutil, "net_io_counters", lambda *, pernic: counters if pernic else None)
    write(tmp_path, {"net/eth0/type": "1\n", "net/ib0/type": "32\n"})
    assert set(network_counters(tmp_path)) == {"eth0", "ib0"}
    write(
        tmp_path,
        {
            "infiniband/mlx5_0/ports/1/counters/port_xmit_data": "1000\n",
            "infiniband/mlx5_0/ports/1/counters/port_rcv_data": "10\n",
            "infiniband/efa_0/ports/1/hw_counters/tx_bytes": "7\n",
        },
    )
    assert network_counters(tmp_path) == {
        "eth0": {"bytes_sent": 1, "bytes_received": 2, "errors": 10},
        "mlx5_0 port 1": {"bytes_sent": 4000, "bytes_received": 40},
    }


def test_traffic_of_nvlinks_is_summed_over_devices() -> None:
    """A link that does not answer once takes nothing from the sum: it would seem to fall."""
    answered: set[object] = set()
    samples: list[list[int | None]] = [[], [None], [5, None], [6, 7], [6, None], [8, 9]]
    told = [nvlink_counters(linked(counts), answered) for counts in samples]
    sums = [each.get("nvlink", {}).get("bytes_sent") for each in told]
    assert sums == [None, None, 5, 13, None, 17]
    assert told[3] == {"nvlink": {"bytes_sent": 13, "bytes_received": 26}}


def linked(counts: list[int | None]) -> list[dict[str, object]]:
    return [
        {
            "uuid": index,
            "nvlink_sent_bytes": sent,
            "nvlink_received_bytes": None if sent is None else 2 * sent,
        }
        for index, sent in enumerate(counts)
    ]
