"""Files that `doctor --network --write` makes hold, for `plan --on`, what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardmark.base.results.network import RankSpeed, read_network
from shardmark.bench.analysis.network.links import with_fits
from shardmark.cli import main
from shardmark.predict.hardware.catalogue import Timed, load_node
from shardmark.predict.hardware.written import write_node
from shardmark.predict.timing import Constants
from shardmark.ranks.measure.system import speed
from tests import GOLDEN, present


def test_a_measured_node_is_read_back(tmp_path: Path) -> None:
    record = present(read_network(GOLDEN))
    speed = RankSpeed(
        flops_per_second={"fp32": 1e11, "bf16": 3e11},
        memory_bytes_per_second=1e10,
        operation_seconds=5e-6,
        shared=0.4,
    )
    fitted = with_fits(record).model_copy(update={"speed": speed})
    write_node(
        tmp_path / "here.yaml",
        fitted,
        device="cpu",
        memory_gib=8,
        source="measured",
    )
    node, constants = load_node(str(tmp_path / "here.yaml")), Constants()
    assert node.node.devices == 1  # on each of two hosts
    assert node.card.peak("fp32") * constants.core_share == pytest.approx(1e11)
    assert node.card.peak("bf16") * constants.product_share == pytest.approx(3e11)
    (all_reduce,) = (each for each in fitted.operations if each.operation == "all_reduce")
    assert all_reduce.fit is not None
    network = node.network_bytes_per_second * constants.network_share
    assert network == pytest.approx(all_reduce.fit.bytes_per_second.value)
    assert node.node.network_latency_seconds == all_reduce.fit.latency_seconds.value
    assert node.node.shared_speed == 0.4
    assert node.card.operation_seconds == 5e-6
    timed = node.node.network_seconds["all_reduce"]
    assert timed.ranks == len(all_reduce.ranks)
    assert [*timed.seconds] == [size.payload_bytes for size in all_reduce.sizes]
    assert sorted(timed.seconds.values()) == [*timed.seconds.values()]


def test_between_measured_sizes_time_follows_powers() -> None:
    timed = Timed(ranks=2, seconds={1000: 1e-3, 100_000: 1e-2})
    assert timed.seconds_of(10) == 1e-3
    assert timed.seconds_of(10_000) == pytest.approx(10**-2.5)
    assert timed.seconds_of(200_000) == pytest.approx(2e-2)


def test_speeds_are_those_of_the_fastest_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SIDE", 64)
    monkeypatch.setattr(speed, "COPIED_BYTES", 2**16)
    threads = torch.get_num_threads()
    found = speed.measure_speed(torch.device("cpu"), 1)
    assert torch.get_num_threads() == threads
    assert 1e6 < found.flops_per_second["fp32"] < 1e14
    assert 1e6 < found.memory_bytes_per_second < 1e14
    assert 1e-8 < present(found.operation_seconds) < 1e-2


def test_write_goes_with_network(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--write", str(tmp_path / "here.yaml")]) == 2
    assert "--write: found without --network" in capsys.readouterr().err
