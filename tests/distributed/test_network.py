"""Links measured between real ranks, over the loopback interface."""

from __future__ import annotations

import pytest

from shardmark.base.errors import ShardmarkError
from shardmark.bench.analysis.network.links import with_fits
from shardmark.ranks.measure.network import probe as network_probe
from shardmark.ranks.measure.network.probe import probe_network

SECONDS = 1.0


def test_links_between_two_ranks_are_measured() -> None:
    """The fixture of all tests looks for children that are left."""
    record = probe_network(2, device="cpu", seconds=SECONDS, threads=1)
    assert record.speed is not None
    assert 1e6 < record.speed.memory_bytes_per_second < 1e13
    assert 0.05 < record.speed.shared <= 1
    assert (record.world_size, record.device_type, record.backend) == (2, "cpu", "gloo")
    assert record.interface == "lo"
    assert len(set(record.hosts)) == 1
    operations = {measured.operation: measured for measured in with_fits(record).operations}
    assert set(operations) == {"point_to_point", "all_reduce", "all_gather", "reduce_scatter"}
    for measured in operations.values():
        assert measured.ranks == (0, 1)
        assert measured.reach == "same_host"
        sizes = [size.payload_bytes for size in measured.sizes]
        assert sizes == sorted(sizes)
        assert sizes[0] == 1024
        assert len(sizes) >= 4
        assert all(len(size.seconds) >= 3 for size in measured.sizes)
        assert all(seconds > 0 for size in measured.sizes for seconds in size.seconds)
        assert measured.fit is not None, measured.reason


def test_failed_rank_is_reported_and_others_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "nosuchtransport")
    with pytest.raises(ShardmarkError, match=r"the ranks failed: .*(?i:gloo|transport)"):
        probe_network(2, device="cpu", seconds=SECONDS)


def test_ranks_that_take_too_long_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_probe, "GRACE_SECONDS", -SECONDS + 0.2)
    with pytest.raises(ShardmarkError, match="the ranks did not finish within 0 s"):
        probe_network(2, device="cpu", seconds=SECONDS)
