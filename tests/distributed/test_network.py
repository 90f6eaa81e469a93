"""Links measured between real ranks, over the loopback interface."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmark.analysis.network.links import with_fits
from shardmark.core.errors import ShardmarkError
from shardmark.measure.network import probe as network_probe
from shardmark.measure.network.probe import probe_network
from shardmark.results.network import NetworkRecord
from shardmark.strategies.base import RankContext
from tests.distributed.ranks import run_ranks

SECONDS = 1.0


def measured(process: RankContext) -> NetworkRecord | None:
    from shardmark.measure.network.links import measure_links

    return measure_links(process.device, seconds=SECONDS)


def test_two_ranks_of_one_group(tmp_path: Path) -> None:
    record, nothing = run_ranks(measured, world_size=2, directory=tmp_path)
    assert nothing is None, "rank 0 alone has the record"
    assert isinstance(record, NetworkRecord)
    assert record.backend == "gloo"
    assert record.interface == "lo"
    assert len(set(record.hosts)) == 1
    found = {one.operation: one for one in with_fits(record).operations}
    assert set(found) == {"point_to_point", "all_reduce", "all_gather", "reduce_scatter"}
    for one in found.values():
        assert one.ranks == (0, 1)
        assert one.reach == "same_host"
        sizes = [size.payload_bytes for size in one.sizes]
        assert sizes == sorted(sizes)
        assert sizes[0] == 1024
        assert len(sizes) >= 4
        assert all(len(size.seconds) >= 3 for size in one.sizes)
        assert all(seconds > 0 for size in one.sizes for seconds in size.seconds)
        assert one.fit is not None, one.reason


def test_started_here_and_nothing_is_left() -> None:
    """The fixture of all tests looks for children."""
    record = probe_network(2, device="cpu", seconds=SECONDS)
    assert record.world_size == 2
    assert record.device_type == "cpu"


def test_a_rank_that_fails_is_told_and_the_others_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "nosuchtransport")
    with pytest.raises(ShardmarkError, match=r"the ranks failed: .*(?i:gloo|transport)"):
        probe_network(2, device="cpu", seconds=SECONDS)


def test_ranks_that_take_too_long_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_probe, "GRACE_SECONDS", -SECONDS + 0.2)
    with pytest.raises(ShardmarkError, match="the ranks were not done after 0 s"):
        probe_network(2, device="cpu", seconds=SECONDS)
