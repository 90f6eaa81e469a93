"""A stored `network.json` of every released version: each must still load, and be fitted alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmark.analysis.network.link_fit import with_fits
from shardmark.results.network import (
    NETWORK_FILE,
    NETWORK_SCHEMA_VERSION,
    read_network,
    write_network,
)

HERE = Path(__file__).parent / "network"
VERSIONS = sorted(path.stem for path in HERE.glob("v*.json"))


def test_todays_version_is_stored() -> None:
    assert f"v{NETWORK_SCHEMA_VERSION}" in VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_still_loads(version: str, tmp_path: Path) -> None:
    (tmp_path / NETWORK_FILE).write_bytes((HERE / f"{version}.json").read_bytes())
    record = read_network(tmp_path)
    assert record is not None
    assert record.hosts == ("node0", "node1")
    link, *_, without = record.operations
    assert link.fit is not None
    assert link.fit.bytes_per_second.value == pytest.approx(1.2e8, rel=1e-6)
    assert link.fit.latency_seconds.value == pytest.approx(1e-4, rel=1e-4)
    assert without.fit is None
    assert without.reason == "fewer than 3 sizes were measured"
    again = with_fits(record).operations[0].fit
    assert again is not None
    assert again.bytes_per_second.value == pytest.approx(link.fit.bytes_per_second.value)


def test_todays_version_is_written_as_it_is_stored(tmp_path: Path) -> None:
    stored = (HERE / f"v{NETWORK_SCHEMA_VERSION}.json").read_bytes()
    (tmp_path / NETWORK_FILE).write_bytes(stored)
    record = read_network(tmp_path)
    assert record is not None
    (tmp_path / "again").mkdir()
    write_network(tmp_path / "again", record)
    assert (tmp_path / "again" / NETWORK_FILE).read_bytes() == stored
