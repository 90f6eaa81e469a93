"""Whose checkpoints are where, and who can go on from one."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import pytest

from shardmark.core.errors import InputError
from shardmark.core.scratch import lock_folder
from shardmark.train import checkpoint_folder
from shardmark.train.checkpoint_folder import (
    check_given,
    check_writable,
    folder_on_node,
    keep,
    rank_folder,
    remove,
    remove_abandoned,
    remove_unowned,
)
from shardmark.trials.trial import Trial
from tests.unit.launch.fakes import trial_of

RECIPES = ("recipe.seed=1", "recipe.seed=2")


def trial(**limits: object) -> Trial:
    return trial_of("ddp", f"limits={json.dumps(limits)}")


def test_restarts_do_not_rename_a_trial() -> None:
    assert trial().id == trial(max_restarts=3, checkpoint_steps=7).id


def test_each_node_has_a_folder_of_its_own(tmp_path: Path) -> None:
    assert folder_on_node(trial(), "/runs/a", 0, here=True) is None
    here = folder_on_node(trial(max_restarts=1), "/runs/a", 0, here=True)
    assert here == Path("/runs/a/checkpoints")
    shared = trial(max_restarts=1, checkpoint_dir=str(tmp_path))
    first, second, other = (
        folder_on_node(shared, run, node, here=node == 0)
        for run, node in (("/runs/a", 0), ("/runs/a", 1), ("/runs/b", 1))
    )
    assert first is not None
    assert second is not None
    assert first.parent == second.parent
    assert len({first, second, other}) == 3
    assert first.is_relative_to(tmp_path)
    for folder in (first, second) * 2:
        check_writable(rank_folder(folder, 0))
        made = (folder.parent, folder, rank_folder(folder, 0))
        assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}, "closed to others"
    remove(first)
    assert second.exists()
    remove(second)
    assert not list(tmp_path.iterdir())


def test_a_killed_nodes_folders_go_with_the_next_trial_of_its_run(tmp_path: Path) -> None:
    given = {"max_restarts": 1, "checkpoint_dir": str(tmp_path)}
    killed, next_trial = (trial_of("ddp", f"limits={json.dumps(given)}", r) for r in RECIPES)
    folders = {
        (t.id, run, node): folder_on_node(t, f"{run}/trials/{t.id}", node, here=False)
        for t in (killed, next_trial)
        for run in ("/runs/a", "/runs/b")
        for node in (1, 2)
    }
    for folder in folders.values():
        assert folder is not None
        check_writable(rank_folder(folder, 0))
    planted = tmp_path / "shardmark-x-0123456789ab"
    planted.symlink_to(tmp_path)
    began = (next_trial.id, "/runs/a", 1)
    remove_abandoned(folders.pop(began), f"/runs/a/trials/{next_trial.id}")
    gone = folders.pop((killed.id, "/runs/a", 1))
    assert gone is not None
    assert not gone.exists()
    assert all(folder is not None and folder.exists() for folder in folders.values())


def test_a_dead_nodes_checkpoints_go_with_the_next_run_unless_a_restart_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    note = lambda folder, until_seconds: held.append(lock_folder(folder, until_seconds))  # noqa: E731
    monkeypatch.setattr(checkpoint_folder, "lock_folder", note)

    def kept(run: str, **limits: object) -> Path:
        of = trial(max_restarts=1, checkpoint_dir=str(tmp_path), **limits)
        folder = folder_on_node(of, run, 1, here=False)
        assert folder is not None
        keep(folder, of)
        check_writable(rank_folder(folder, 0))
        return folder

    ended, awaited = kept("/runs/a"), kept("/runs/b", node_return_seconds=1, trial_seconds=60)
    for descriptor in held:
        os.close(descriptor)
    living = kept("/runs/c")
    remove_unowned(tmp_path)
    assert not ended.parent.exists()
    assert rank_folder(awaited, 0).exists()
    assert rank_folder(living, 0).exists()
    later = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: later)
    remove_unowned(tmp_path)
    assert not awaited.parent.exists(), "the trial's time is over"
    assert rank_folder(living, 0).exists()
    os.close(held[-1])


def test_a_folder_that_cannot_be_made_is_named_by_its_key(tmp_path: Path) -> None:
    good, file = tmp_path / "new" / "good", tmp_path / "file"
    file.touch()
    check_given([trial(max_restarts=1, checkpoint_dir=str(good))])
    assert list(good.iterdir()) == []
    bad = str(file / "below")
    check_given([trial(checkpoint_dir=bad), trial(max_restarts=1)])  # nothing is written
    with pytest.raises(InputError, match=r"limits\.checkpoint_dir: .*below on .*Not a directory"):
        check_given([trial(max_restarts=1, checkpoint_dir=bad)])


@pytest.mark.parametrize("planted", ["a link", "open to others", "another user's"])
def test_a_folder_that_others_have_prepared_is_refused(tmp_path: Path, planted: str) -> None:
    """Its name can be foreseen, and the folder for temporary files is everybody's."""
    shared = trial(max_restarts=1, checkpoint_dir=str(tmp_path))
    folder = folder_on_node(shared, "/runs/a", 1, here=False)
    assert folder is not None
    if planted == "a link":
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        folder.parent.symlink_to(elsewhere)
    else:
        folder.parent.mkdir()
        folder.parent.chmod(0o777 if planted == "open to others" else 0o755)
    if planted == "another user's":
        if os.geteuid():
            pytest.skip("only root can make a folder of another user")
        os.chown(folder.parent, 65534, 65534)
    with pytest.raises(InputError, match=f"limits.checkpoint_dir: .*{folder.parent.name} is"):
        check_writable(rank_folder(folder, 0))
