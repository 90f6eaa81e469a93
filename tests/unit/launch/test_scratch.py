"""A node's folder is removed at its end, and by others once its owner is dead."""

from __future__ import annotations

import fcntl
import tempfile
from pathlib import Path

import pytest

from shardmark.launch.nodes.scratch import LOCK_FILE, PREFIX, remove_abandoned, scratch_folder


def test_only_what_nobody_owns_any_more_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, foreign, other = (tmp_path / name for name in (f"{PREFIX}dead", f"{PREFIX}x", "shard"))
    for folder in (dead, foreign, other):
        (folder / "logs").mkdir(parents=True)
    for folder in (dead, other):
        (folder / LOCK_FILE).touch()
    with scratch_folder() as living:
        (living / "rank-0.json").touch()
        with (living / LOCK_FILE).open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_abandoned()
        assert {path.name for path in tmp_path.iterdir()} == {living.name, foreign.name, other.name}
    assert not living.exists()
