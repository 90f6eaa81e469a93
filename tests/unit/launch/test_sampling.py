"""Which processes are sampled as ranks, also when a restart gives a rank another one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from shardmark.core.run_files import rank_file
from shardmark.launch import trial_artifacts
from shardmark.launch.trial_artifacts import RankSampler, rank_record
from shardmark.results.schema import RankRecord
from tests.golden.invented import invented_rank

if TYPE_CHECKING:
    import pytest

PARENT = os.getppid()


def leave(folder: Path, record: RankRecord, **changes: object) -> None:
    """As ranks do: a reader never sees half of it."""
    part = folder / "part"
    part.write_text(record.model_copy(update=changes).model_dump_json())
    part.replace(folder / rank_file(record.rank))


def sampled(folder: Path) -> list[dict[int, int]]:
    """The process of each rank in each sample."""
    lines = (folder / "samples.jsonl").read_text().splitlines()
    return [{one["rank"]: one["pid"] for one in json.loads(line)["ranks"]} for line in lines]


def test_a_restarted_rank_is_sampled_in_its_new_process(tmp_path: Path) -> None:
    """This process and its parent stand for the rank's two."""
    sampler = RankSampler(tmp_path, "samples.jsonl", range(2), sample_seconds=3600)
    with sampler:
        sampler.look()
        leave(tmp_path, invented_rank(0), pid=PARENT)
        sampler.look()
        (tmp_path / rank_file(0)).unlink()
        sampler.look()
        leave(tmp_path, invented_rank(0), pid=os.getpid())
        sampler.look()
        sampler.look()
    assert sampled(tmp_path) == [{}, {0: PARENT}, {0: os.getpid()}, {0: os.getpid()}]


def test_records_are_read_only_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def counted(directory: Path, rank: int) -> RankRecord | None:
        read.append(rank)
        return rank_record(directory, rank)

    monkeypatch.setattr(trial_artifacts, "rank_record", counted)
    with RankSampler(tmp_path, "samples.jsonl", range(1), sample_seconds=3600) as sampler:
        leave(tmp_path, invented_rank(0), pid=PARENT)
        for _ in range(3):
            sampler.look()
        leave(tmp_path, invented_rank(0), pid=os.getpid())
        sampler.look()
    assert read == [0, 0]
