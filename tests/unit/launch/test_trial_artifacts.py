"""What ranks leave in a trial's folder: merged, read as far as it is whole, cleared away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardmark.core.run_files import (
    LOG_FILE,
    LOST_FILE,
    SAMPLES_FILE,
    STEPS_FILE,
    rank_file,
    rank_steps_file,
)
from shardmark.launch.trial_artifacts import (
    clear,
    merge_logs,
    merge_samples,
    merge_steps,
    number_logs,
    rank_record,
    rank_records,
    read_lines,
)
from tests.golden.invented import invented_rank


def write_log(folder: Path, rank: int, name: str, text: str | bytes) -> None:
    file = folder / "logs" / "run_x" / "attempt_0" / str(rank) / f"{name}.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())


def test_records_of_the_ranks_that_wrote_one(tmp_path: Path) -> None:
    first = invented_rank(0)
    (tmp_path / rank_file(0)).write_text(first.model_dump_json())
    (tmp_path / rank_file(1)).write_text(first.model_dump_json()[:40])
    assert rank_records(tmp_path, 3) == (first,)
    assert rank_record(tmp_path, 1) is None


def test_record_of_a_lost_worker_says_how_it_died(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / rank_file(rank)).write_text(invented_rank(rank).model_dump_json())
    (tmp_path / LOST_FILE.format(1)).write_text("was ended by SIGKILL")
    first, second = rank_records(tmp_path, 2)
    assert (first.lost, second.lost) == (None, "was ended by SIGKILL")
    clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_steps_are_merged_in_order_of_rank(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        (tmp_path / rank_steps_file(rank)).write_text(f'{{"rank": {rank}}}\n')
    merge_steps(tmp_path, 11)
    assert list(read_lines(tmp_path / STEPS_FILE)) == [{"rank": 0}, {"rank": 2}, {"rank": 10}]


def test_steps_of_no_rank_are_an_empty_file(tmp_path: Path) -> None:
    merge_steps(tmp_path, 2)
    assert (tmp_path / STEPS_FILE).read_text() == ""


def test_logs_carry_their_rank_and_stream(tmp_path: Path) -> None:
    write_log(tmp_path, 1, "stdout", "second\n")
    write_log(tmp_path, 0, "stderr", b"a warning \xff\nand more\n")
    (tmp_path / "agent.log").write_text("agent started\n")
    merge_logs(tmp_path)
    assert (tmp_path / LOG_FILE).read_text() == (
        "[rank 0 stderr] a warning \ufffd\n"
        "[rank 0 stderr] and more\n"
        "[rank 1 stdout] second\n"
        "[launcher] agent started\n"
    )


def test_lines_end_where_a_kill_cut_them(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    assert list(read_lines(file)) == []
    file.write_text('{"a": 1}\n{"a": 2}\n{"a": ')
    assert list(read_lines(file)) == [{"a": 1}, {"a": 2}]
    file.write_text('{"a": 1}\n' + "\0" * 20)
    assert list(read_lines(file)) == [{"a": 1}]


def fill(folder: Path) -> None:
    write_log(folder, 0, "stdout", "x")
    for name in ("result.json", STEPS_FILE, "samples.jsonl", LOG_FILE, "trial.json", "rank-0.json"):
        (folder / name).write_text("{}")


def test_clear_keeps_a_trial_s_own_files(tmp_path: Path) -> None:
    fill(tmp_path)
    clear(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "result.json",
        "steps.jsonl",
        "samples.jsonl",
        "log.txt",
    }


def test_empty_keeps_nothing(tmp_path: Path) -> None:
    fill(tmp_path)
    clear(tmp_path, keep=())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ranks", [(0, 1), (2, 3), (1, 0), (0, 4)])
def test_output_gets_the_ranks_numbers(tmp_path: Path, ranks: tuple[int, int]) -> None:
    """Also where one's new number is another's old one."""
    for local in (0, 1):
        write_log(tmp_path, local, "stdout", f"local {local}\n")
    number_logs(tmp_path, ranks)
    for name in ("agent.log", "agent.node-1.log"):
        (tmp_path / name).write_text("begun\n")
    merge_logs(tmp_path)
    lines = [f"[rank {rank} stdout] local {local}" for local, rank in enumerate(ranks)]
    launchers = ["[launcher] begun", "[launcher of node 1] begun"]
    assert (tmp_path / LOG_FILE).read_text().splitlines() == [*sorted(lines), *launchers]


def write_samples(folder: Path, node: int, *at_seconds: float) -> None:
    lines = [json.dumps({"at_seconds": at, "ranks": []}) for at in at_seconds]
    (folder / f"samples.node-{node}.jsonl").write_text("\n".join([*lines, '{"cut of']))


def test_samples_of_nodes_come_in_order_of_time_with_their_node(tmp_path: Path) -> None:
    write_samples(tmp_path, 0, 1.0, 3.0)
    write_samples(tmp_path, 1, 2.0, 4.0)
    merge_samples(tmp_path)
    lines = list(read_lines(tmp_path / SAMPLES_FILE))
    assert [(line["at_seconds"], line["node"]) for line in lines] == [
        (1, 0),
        (2, 1),
        (3, 0),
        (4, 1),
    ]


def test_samples_of_one_node_are_as_the_local_engines(tmp_path: Path) -> None:
    write_samples(tmp_path, 0, 1.0)
    merge_samples(tmp_path)
    assert list(read_lines(tmp_path / SAMPLES_FILE)) == [{"at_seconds": 1.0, "ranks": []}]
