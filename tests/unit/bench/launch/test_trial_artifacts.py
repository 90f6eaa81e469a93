"""Files of ranks in a trial's folder are sampled, merged, read as far as intact, and cleared."""

from __future__ import annotations

import errno
import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from shardmark.base.errors import StorageError
from shardmark.base.files.run_files import LOG_FILE, SAMPLES_FILE, rank_file
from shardmark.base.results.schema import RankError, RankRecord
from shardmark.bench.launch import trial_artifacts
from shardmark.bench.launch.outcome import Ending, ProcessEnd
from shardmark.bench.launch.trial_artifacts import (
    RankSampler,
    clear,
    merge_logs,
    merge_samples,
    process_ends,
    raise_disk_error,
    rank_record,
    rank_records,
    read_lines,
)
from shardmark.ranks.measure.step.progress import ProgressWriter
from shardmark.ranks.measure.system.sampler import SystemSampler
from tests.golden.invented import invented_rank


def write_log(folder: Path, rank: int, name: str, text: bytes) -> None:
    file = folder / "logs" / str(rank) / f"{name}.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text)


def leave(folder: Path, rank: int, **changes: object) -> None:
    """Write the file as ranks do: a reader never sees half of it."""
    part = folder / "part"
    part.write_text(invented_rank(rank).model_copy(update=changes).model_dump_json())
    part.replace(folder / rank_file(rank))


def test_records_of_ranks_are_read(tmp_path: Path) -> None:
    for rank in range(2):
        leave(tmp_path, rank)
    (tmp_path / rank_file(2)).write_text(invented_rank(2).model_dump_json()[:40])
    assert rank_records(tmp_path, range(4)) == (invented_rank(0), invented_rank(1))
    clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_output_is_merged_by_rank_and_cut_at_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_artifacts, "MAX_LOG_BYTES", 9)
    for rank in (10, 2):
        text = f"cut\nrank \xff{rank:02}\n"
        write_log(tmp_path, rank, "stdout", text.encode("latin-1"))
    for name in ("agent.log", "agent.node-1.log"):
        (tmp_path / name).write_text("begun\n")
    merge_logs(tmp_path)
    lines = [
        f"[rank {rank} stdout] {text}"
        for rank in (2, 10)
        for text in ("(the first 4 bytes are cut)", f"rank \ufffd{rank:02}")
    ]
    launchers = ["[launcher] begun", "[launcher of node 1] begun"]
    assert (tmp_path / LOG_FILE).read_text().splitlines() == [*lines, *launchers]


@pytest.mark.parametrize("cut", [b'{"a": ', b"\0" * 20, b'{"a": "much longer"}\n'])
def test_read_lines_stops_at_a_truncated_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: bytes
) -> None:
    assert list(read_lines(tmp_path / SAMPLES_FILE)) == []
    monkeypatch.setattr(trial_artifacts, "MAX_LINE_BYTES", 10)
    (tmp_path / SAMPLES_FILE).write_bytes(b'{"a": 1}\n' + cut)
    assert list(read_lines(tmp_path / SAMPLES_FILE)) == [{"a": 1}]


@pytest.mark.parametrize(
    ("nodes", "merged"),
    [
        ([(1.0, 3.0), (2.0, 4.0)], [(1, 0), (2, 1), (3, 0), (4, 1)]),
        ([(1.0,)], [(1, None)]),  # as the local engine's
    ],
)
def test_samples_of_nodes_are_sorted_by_time(
    tmp_path: Path, nodes: list[tuple[float, ...]], merged: list[tuple[float, int | None]]
) -> None:
    for node, times in enumerate(nodes):
        lines = [json.dumps({"at_seconds": at, "ranks": []}) for at in times]
        (tmp_path / f"samples.node-{node}.jsonl").write_text("\n".join([*lines, '{"cut of']))
    merge_samples(tmp_path)
    lines_read = read_lines(tmp_path / SAMPLES_FILE)
    assert [(line["at_seconds"], line.get("node")) for line in lines_read] == merged


def test_sampling_starts_with_the_ranks_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def counted(directory: Path, rank: int) -> RankRecord | None:
        read.append(rank)
        return rank_record(directory, rank)

    monkeypatch.setattr(trial_artifacts, "rank_record", counted)
    with RankSampler(tmp_path, SAMPLES_FILE, range(2), sample_seconds=3600) as sampler:
        sampler.look()
        for rank in range(2):
            leave(tmp_path, rank, pid=os.getpid())
            sampler.look()
            sampler.look()
    sampled = [
        {rank["rank"] for rank in line["ranks"]} for line in read_lines(tmp_path / SAMPLES_FILE)
    ]
    assert sampled == [set(), {0}, {0, 1}, {0, 1}]
    assert read.count(0) == 2


def test_sample_is_taken_after_the_last_step(
    tmp_path: Path,
) -> None:
    with (
        RankSampler(tmp_path, SAMPLES_FILE, range(1), sample_seconds=3600) as sampler,
        ProgressWriter.opened(tmp_path, 0, total_steps=5) as progress,
    ):
        for steps, total in ((4, 5), (5, 5), (5, 5), (7, 9), (9, 9)):
            progress.lengthen(total)
            progress.stepped(steps)
            sampler.look()
    # One at the start, one at the stop, and one each time that no step is left.
    assert len(list(read_lines(tmp_path / SAMPLES_FILE))) == 1 + 2 + 1


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), StorageError),
        (PermissionError(errno.EACCES, "no /proc"), None),
    ],
)
def test_disk_error_stops_sampling(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: OSError,
    raised: type[StorageError] | None,
) -> None:
    def broken(_: SystemSampler) -> dict[str, object]:
        raise error

    monkeypatch.setattr(SystemSampler, "_sample", broken)
    with (
        nullcontext() if raised is None else pytest.raises(raised, match="make room"),
        RankSampler(tmp_path, SAMPLES_FILE, range(1), sample_seconds=3600),
    ):
        pass
    (line,) = read_lines(tmp_path / SAMPLES_FILE)
    assert str(error) in str(line["failure"])


def test_disk_error_of_a_rank_is_raised(tmp_path: Path) -> None:
    error = RankError(kind="storage", message="OSError: [Errno 5] EIO: 'x'", at_seconds=1.0)
    with pytest.raises(StorageError, match="Errno 5"):
        raise_disk_error(
            tmp_path, [invented_rank(0).model_copy(update={"error": error})], exited(1)
        )
    raise_disk_error(tmp_path, [invented_rank(0)], exited(1))


@pytest.mark.parametrize("codes", [(os.EX_IOERR,), (1, os.EX_IOERR)], ids=["launcher", "rank"])
def test_disk_error_without_a_record_is_raised(tmp_path: Path, codes: tuple[int, ...]) -> None:
    """The disk has room again: what filled it went with the trial."""
    with pytest.raises(StorageError, match="a disk error stopped the trial; make room"):
        raise_disk_error(tmp_path, [invented_rank(0)], exited(*codes))


def exited(agent: int, *ranks: int) -> Ending:
    ends = [
        ProcessEnd(rank=rank, exit_code=code, at_seconds=1.0) for rank, code in enumerate(ranks)
    ]
    return Ending(status="exited", agent_exit_code=agent, failures=tuple(ends))


@pytest.mark.parametrize("text", ['[{"rank": 0, "more": 1}]', "[3]", "3", "{", "[[[", '{"a": 1}'])
def test_truncated_agent_file_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / trial_artifacts.AGENT_FILE).write_text(text)
    assert process_ends(tmp_path) == ()
