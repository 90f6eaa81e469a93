"""A rank's process and its descendants; processes come and go while they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmark.ranks.measure.system import process_tree
from shardmark.ranks.measure.system.process_tree import PAGE_BYTES, ProcessTree
from tests.unit.ranks.measure.fake_proc import end_process, write_process


@pytest.fixture(autouse=True)
def _count_files_in_a_plain_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder's size is the number of its files in /proc only."""

    def open_files(self: ProcessTree, pid: int) -> int:
        return len(list((Path(self._proc) / str(pid) / "fd").iterdir()))

    monkeypatch.setattr(process_tree.ProcessTree, "_open_files", open_files)


def read(tree: ProcessTree) -> dict[str, object]:
    found = tree.read()
    assert found is not None
    return found


def test_descendants_are_included(tmp_path: Path) -> None:
    write_process(tmp_path, 10, children=[11], cpu_seconds=1, switches=(3, 5))
    write_process(tmp_path, 11, children=[12], cpu_seconds=2, waited_seconds=0.5)
    write_process(tmp_path, 12, rss_pages=1)
    for pid, written in ((10, 700), (11, 50)):  # that of 12 may not be read
        (tmp_path / str(pid) / "io").write_text(f"rchar: 9\nwchar: {written}\nsyscr: 1\n")
    tree = ProcessTree(10, tmp_path)
    tree.refresh()
    assert read(tree) == {
        "pid": 10,
        "cpu_seconds": 3.5,
        "rss_bytes": 21 * PAGE_BYTES,
        "threads": 4,
        "processes": 3,
        "open_files": 12,
        "written_bytes": 750,
        "context_switches": 14,
    }


def test_unreadable_counts_of_bytes_are_not_zero(tmp_path: Path) -> None:
    write_process(tmp_path, 10)
    assert read(ProcessTree(10, tmp_path))["written_bytes"] is None


def test_counters_never_fall_when_a_descendant_ends(tmp_path: Path) -> None:
    write_process(tmp_path, 10, children=[11], cpu_seconds=1)
    write_process(tmp_path, 11, cpu_seconds=2, switches=(7,))
    tree = ProcessTree(10, tmp_path)
    tree.refresh()
    before = read(tree)
    end_process(tmp_path, 11)  # while still listed
    after = read(tree)
    assert (before["cpu_seconds"], after["cpu_seconds"]) == (3.0, 3.0)
    assert (before["context_switches"], after["context_switches"]) == (10, 10)
    assert after["processes"] == 1
    write_process(tmp_path, 11, state="Z", cpu_seconds=4)
    zombie = read(tree)
    assert (zombie["cpu_seconds"], zombie["processes"], zombie["threads"]) == (5.0, 1, 1)


def test_switches_of_an_ended_thread_are_kept(tmp_path: Path) -> None:
    write_process(tmp_path, 10, switches=(3, 5))
    tree = ProcessTree(10, tmp_path)
    assert read(tree)["context_switches"] == 8
    write_process(tmp_path, 10, switches=(4,))
    assert read(tree)["context_switches"] == 9
    write_process(tmp_path, 10, switches=(4, 2))  # the thread's id is in use again
    assert read(tree)["context_switches"] == 11


def test_ended_zombie_or_reused_process_gives_none(tmp_path: Path) -> None:
    assert ProcessTree(10, tmp_path).read() is None
    write_process(tmp_path, 10, state="Z")
    assert ProcessTree(10, tmp_path).read() is None
    write_process(tmp_path, 10)
    tree = ProcessTree(10, tmp_path)
    read(tree)
    write_process(tmp_path, 10, started_ticks=78)
    assert tree.read() is None
