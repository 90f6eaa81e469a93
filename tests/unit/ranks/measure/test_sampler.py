"""The sampler writes what it is told to look at, and never takes the trial down."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from shardmark.ranks.measure.system.gpus import GpuReader
from shardmark.ranks.measure.system.machine_load import TICKS_PER_SECOND, MachineLoad
from shardmark.ranks.measure.system.sampler import SystemSampler
from tests.unit.ranks.measure.fake_proc import end_process, write_process

FULL = (7 * 2**30, None)
"""Bytes in use on each device."""
NEVER = 3600.0
"""So long a period that only the samples asked for are taken."""


class FakeGpus(GpuReader):
    opened: list[frozenset[str]]

    def __init__(self, uuids: Iterable[str]) -> None:
        self.uuids = sorted(uuids)
        self.closed = False

    def read(self, pids: Mapping[int, Collection[int]]) -> list[dict[str, object]]:  # noqa: ARG002
        return [
            {
                "uuid": uuid,
                "nvlink_sent_bytes": 5,
                "nvlink_received_bytes": 7,
                "memory_used_bytes": used,
            }
            for uuid, used in zip(self.uuids, FULL, strict=False)
        ]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def sampler(tmp_path: Path) -> Iterator[SystemSampler]:
    seconds = count(100.0, 0.25)
    made = SystemSampler(
        tmp_path / "samples.jsonl",
        NEVER,
        clock=lambda: next(seconds),
        network=lambda: {"lo": {"bytes_sent": 1, "bytes_received": 2}},
        open_gpus=FakeGpus,
        proc=tmp_path / "proc",
    )
    yield made
    made.stop()


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]


def test_start_and_stop_take_a_sample(tmp_path: Path, sampler: SystemSampler) -> None:
    sampler.start()
    sampler.stop()
    first, last = lines(tmp_path)
    assert first["ranks"] == first["gpus"] == []
    assert first["network"] == {"lo": {"bytes_sent": 1, "bytes_received": 2}}
    assert last["at_seconds"] > first["at_seconds"]
    sampler.stop()  # does nothing more
    assert len(lines(tmp_path)) == 2


def test_ranks_appear_and_vanish(tmp_path: Path, sampler: SystemSampler) -> None:
    write_process(tmp_path / "proc", 10, children=[11], cpu_seconds=1)
    write_process(tmp_path / "proc", 11)
    write_process(tmp_path / "proc", 20)
    sampler.start()
    sampler.set_ranks({0: 10})
    sampler.set_ranks({0: 10, 1: 20})
    end_process(tmp_path / "proc", 10)
    sampler.stop()
    found = [[rank["rank"] for rank in line["ranks"]] for line in lines(tmp_path)]
    assert found == [[], [0], [0, 1], [1]]
    rank = lines(tmp_path)[1]["ranks"][0]
    assert (rank["pid"], rank["cpu_seconds"], rank["processes"]) == (10, 1.0, 2)


def test_load_covers_the_usable_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2})
    # user nice system idle iowait irq softirq steal guest guest_nice
    ticks = [second * TICKS_PER_SECOND for second in (100, 10, 20, 5000, 300, 1, 2, 4, 50, 5)]
    core = " ".join(map(str, ticks))
    stat = f"cpu  {core}\ncpu0 {core}\ncpu1 {core}\ncpu2 {core}\ncpu12 {core}\nintr 5 0\n"
    waited = "some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\nfull avg10=0.00 total=7\n"
    heat = "sys/devices/system/cpu/cpu1/thermal_throttle/package_throttle_total_time_ms"
    for name, text in {
        "proc/stat": stat,
        "proc/pressure/cpu": waited,
        "proc/pressure/memory": "",
        heat: "1500\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    load = MachineLoad(tmp_path / "proc")
    assert load.read() == {
        "cpu_seconds": 2 * 137.0,
        "cores": 2,
        "cpu_pressure_seconds": 2.5,
        "memory_pressure_seconds": None,
        "throttled_seconds": 1.5,
    }
    own = tmp_path / "sys/fs/cgroup/batch"
    own.mkdir(parents=True)
    (own / "cpu.pressure").write_text(waited.replace("2500000", "1000000"))
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("0::/batch\n")
    of_group = MachineLoad(tmp_path / "proc").read()
    assert of_group is not None
    assert of_group["cpu_pressure_seconds"] == 1.0, "its own group's tasks are those that matter"
    (tmp_path / "proc/stat").unlink()
    assert load.read() is None


def test_many_threads_are_counted_less_often(tmp_path: Path, sampler: SystemSampler) -> None:
    write_process(tmp_path / "proc", 10, switches=[2] * 30)
    sampler.start()
    sampler.set_ranks({0: 10})
    for _ in range(3):
        sampler.sample_now()
    sampler.stop()
    found = [line["ranks"][0]["context_switches"] for line in lines(tmp_path)[1:]]
    assert found == [60, None, 60, None, 60]  # the last one always


def test_devices_are_opened_once_and_sampled(tmp_path: Path, sampler: SystemSampler) -> None:
    sampler.start()
    sampler.set_ranks({}, gpu_uuids=["b", "a"])
    first = sampler._gpus
    sampler.set_ranks({}, gpu_uuids=["a", "b"])
    assert sampler._gpus is first  # still open
    sampler.stop()
    networks = [set(line["network"]) for line in lines(tmp_path)]
    assert networks[0] == {"lo"}, "no device is known yet"
    assert networks[1] == networks[-1] == {"lo", "nvlink"}
    assert isinstance(first, FakeGpus)
    assert first.closed
    assert [one["uuid"] for one in lines(tmp_path)[1]["gpus"]] == ["a", "b"]


def test_a_failure_is_told_and_not_raised(tmp_path: Path) -> None:
    def broken() -> dict[str, dict[str, int]]:
        raise PermissionError("no /proc/net")

    sampler = SystemSampler(tmp_path / "samples.jsonl", NEVER, network=broken)
    sampler.start()
    sampler.set_ranks({0: os.getpid()})
    sampler.stop()
    assert isinstance(sampler.error, PermissionError)
    assert [line["failure"] for line in lines(tmp_path)] == ["PermissionError: no /proc/net"]


def test_samples_are_flushed_periodically(tmp_path: Path, sampler: SystemSampler) -> None:
    sampler.start()
    assert lines(tmp_path) == []
    for _ in range(12):  # two readings of the clock each, so half a second
        sampler.sample_now()
    assert len(lines(tmp_path)) >= 10


def test_sampler_reads_a_real_process(tmp_path: Path) -> None:
    """The only test with a real /proc and a running thread."""
    sampler = SystemSampler(tmp_path / "samples.jsonl", 0.05)
    sampler.start()
    sampler.set_ranks({0: os.getpid()})
    while sampler._sample_count < 4:  # the thread took one
        sum(range(10_000))
    sampler.stop()
    assert sampler.error is None
    assert set(lines(tmp_path)[0]["network"]["lo"]) == {*("bytes_sent", "bytes_received", "errors")}
    machine = [line["machine"] for line in lines(tmp_path)]
    assert machine[0]["cores"] >= 1
    assert 0 < machine[0]["cpu_seconds"] <= machine[-1]["cpu_seconds"]
    found = [line["ranks"][0] for line in lines(tmp_path)[1:]]
    assert len(found) >= 4
    assert found[0]["rss_bytes"] > 2**20
    assert found[0]["open_files"] >= 3
    assert found[0]["threads"] >= 2
    assert found[-1]["cpu_seconds"] >= found[0]["cpu_seconds"] > 0
    assert found[-1]["context_switches"] >= found[0]["context_switches"] > 0
