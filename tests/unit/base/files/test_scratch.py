"""Folders that nobody owns any more are removed, and no others."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from shardmark.base.files.scratch import (
    PREFIX,
    lock_file,
    lock_folder,
    remove_if_abandoned,
    scratch_folder,
)

if TYPE_CHECKING:
    import pytest


def dead(folder: Path) -> Path:
    (folder / "logs").mkdir(parents=True)
    os.close(lock_folder(folder))
    (folder / "file").touch()
    return folder


def test_scratch_folders_without_an_owner_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of another machine, whose locks are not seen here, or what a link leads to."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead(tmp_path / f"{PREFIX}dead")
    other, unlocked = dead(tmp_path / "other"), tmp_path / f"{PREFIX}unlocked"
    unlocked.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("platform.node", lambda: "elsewhere")
        elsewhere = dead(tmp_path / f"{PREFIX}elsewhere")
    with scratch_folder() as living:
        with scratch_folder():
            pass
        link, open_to_others = tmp_path / f"{PREFIX}link", dead(tmp_path / f"{PREFIX}open")
        link.symlink_to(other)
        open_to_others.chmod(0o777)
        with monkeypatch.context() as patch:
            patch.setattr("os.geteuid", lambda: 12345)
            foreign = dead(tmp_path / f"{PREFIX}foreign")
            with scratch_folder():
                pass
            assert foreign.exists(), "it belongs to somebody else"
        (foreign / "link").symlink_to(other)
        with scratch_folder():
            pass
        kept = {living, unlocked, other, elsewhere, link, open_to_others}
        assert set(tmp_path.iterdir()) == kept
        assert {path.name for path in other.iterdir()} == {"logs", "file", lock_file()}
    assert not living.exists()


def test_folder_stays_for_forked_processes(tmp_path: Path) -> None:
    folder = dead(tmp_path / "folder")
    descriptor = lock_folder(folder)
    inherited = os.dup(descriptor)  # what a fork does with it
    os.close(descriptor)
    remove_if_abandoned(folder)
    assert (folder / "file").exists()
    os.close(inherited)
    remove_if_abandoned(folder)
    assert not folder.exists()


def test_scratch_folder_is_not_inside_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that empties its folder would remove its records."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    with scratch_folder() as folder:
        assert not folder.is_relative_to(tmp_path)
