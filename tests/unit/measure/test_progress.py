"""How far a rank has come, through a file that may be missing or cut."""

from __future__ import annotations

from pathlib import Path

from shardmark.measure.progress import Progress, progress_file, steps_in_all, steps_taken


def test_round_trip(tmp_path: Path) -> None:
    assert (steps_taken(tmp_path, 1), steps_in_all(tmp_path, 1)) == (None, None)
    with Progress.opened(tmp_path, 1, total_steps=2**40) as progress:
        assert (steps_taken(tmp_path, 1), steps_in_all(tmp_path, 1)) == (0, 2**40)
        progress.update(7)
        assert steps_taken(tmp_path, 1) == 7
        progress.update(8)
    assert (steps_taken(tmp_path, 1), steps_in_all(tmp_path, 1)) == (8, 2**40)
    assert steps_taken(tmp_path, 0) is None


def test_an_earlier_attempt_is_overwritten(tmp_path: Path) -> None:
    with Progress.opened(tmp_path, 0, total_steps=5) as progress:
        progress.update(5)
    with Progress.opened(tmp_path, 0, total_steps=9):
        assert (steps_taken(tmp_path, 0), steps_in_all(tmp_path, 0)) == (0, 9)


def test_cut_file_tells_nothing(tmp_path: Path) -> None:
    with Progress.opened(tmp_path, 0, total_steps=5) as progress:
        progress.update(3)
    file = progress_file(tmp_path, 0)
    whole = file.read_bytes()
    file.write_bytes(whole[:12])
    assert (steps_taken(tmp_path, 0), steps_in_all(tmp_path, 0)) == (3, None)
    file.write_bytes(b"")
    assert (steps_taken(tmp_path, 0), steps_in_all(tmp_path, 0)) == (None, None)
