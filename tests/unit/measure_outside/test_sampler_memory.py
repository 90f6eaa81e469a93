"""The sampler's figure for those who watch: the fullest device, else the fullest rank."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shardmark.measure.system.sampler import SystemSampler
from tests.unit.measure_outside.fake_proc import write_process
from tests.unit.measure_outside.test_sampler import NEVER, FakeGpus


class FullGpus(FakeGpus):
    def __init__(self, uuids: Iterable[str]) -> None:
        super().__init__(uuids)
        self._used: list[object] = [5 * 2**30, 7 * 2**30, None]

    def read(self) -> list[dict[str, object]]:
        return [
            {"uuid": uuid, "memory_used_bytes": used}
            for uuid, used in zip(self.uuids, self._used, strict=False)
        ]


def test_memory_is_that_of_the_fullest(tmp_path: Path) -> None:
    sampler = SystemSampler(
        tmp_path / "samples.jsonl",
        NEVER,
        network=dict,
        open_gpus=FullGpus,
        proc=tmp_path / "proc",
    )
    with sampler:
        assert sampler.memory_bytes is None
        for pid in (10, 20):
            write_process(tmp_path / "proc", pid)
        sampler.set_ranks({0: 10, 1: 20})
        on_host = sampler.memory_bytes
        assert on_host is not None
        assert 0 < on_host < 2**30
        sampler.set_ranks({0: 10, 1: 20}, gpu_uuids=["a", "b", "c"])
        assert sampler.memory_bytes == 7 * 2**30
