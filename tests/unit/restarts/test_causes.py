"""Why a trial was restarted, whose checkpoints are where, and what the failure says."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmark.config.load import from_mapping
from shardmark.core.errors import InputError
from shardmark.launch.outcome import NoticedCause, first_causes
from shardmark.launch.trial_artifacts import RESTARTS_FILE, read_restarts
from shardmark.strategies import build_strategy
from shardmark.train.checkpoint_folder import check_given, folder_on_node, remove
from shardmark.trials.matrix import expand
from shardmark.trials.trial import Trial


def cause(
    restart: int, at_seconds: float, reason: str, *, unprovoked: bool = False
) -> NoticedCause:
    return NoticedCause(
        restart=restart, at_seconds=at_seconds, reason=reason, unprovoked=unprovoked
    )


def test_the_first_of_several_nodes_names_the_cause() -> None:
    found = first_causes(
        [cause(2, 9.0, "b"), cause(1, 5.0, "connection reset"), cause(1, 4.0, "killed")]
    )
    assert [one.reason for one in found] == ["killed", "b"]


def test_a_closed_connection_seen_sooner_than_the_death_behind_it_is_no_cause() -> None:
    peer, killed = (
        cause(1, 4.0, "rank 0: Connection closed by peer"),
        cause(1, 4.02, "rank 2 was ended by SIGKILL", unprovoked=True),
    )
    later = killed.model_copy(update={"at_seconds": 7.0})
    assert [one.reason for one in first_causes([peer, killed])] == [killed.reason]
    assert [one.reason for one in first_causes([peer, later])] == [peer.reason], "tidied up"


def test_a_line_cut_short_ends_the_file(tmp_path: Path) -> None:
    assert read_restarts(tmp_path) == ()
    file = tmp_path / RESTARTS_FILE
    file.write_text(cause(1, 2.0, "killed").model_dump_json() + '\n{"restart": 2, "at')
    assert read_restarts(tmp_path) == (cause(1, 2.0, "killed"),)


def trial(**limits: object) -> Trial:
    mapping = {
        "name": "restarts",
        "workload": {"name": "classification", "model": "vit_cifar", "dataset": "digits"},
        "recipe": {"global_batch": 16, "steps": 4},
        "matrix": {"strategy": ["ddp"], "world_size": [2]},
        "limits": limits,
    }
    return expand(from_mapping(mapping), "cpu").trials[0]


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
    for folder in (first, second):
        (folder / "rank-0").mkdir(parents=True)
    remove(first)
    assert second.exists()
    remove(second)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "options", "recipe", "why"),
    [
        ("zero-2", {}, {}, None),
        ("zero-2", {"mixed_precision": "native"}, {"precision": "bf16"}, "16-bit engines"),
        ("zero-3", {}, {"cpu_offload": True}, "offloads"),
        ("fsdp", {}, {"cpu_offload": True}, None),
        ("ps-async", {}, {}, None),
    ],
)
def test_who_cannot_go_on_says_why(
    name: str, options: dict[str, object], recipe: dict[str, object], why: str | None
) -> None:
    changed = trial().recipe.model_copy(update=recipe)
    found = build_strategy(name, options).resume_blocker(changed)
    assert found is None if why is None else why in (found or "")


def test_a_folder_that_cannot_be_made_is_named_by_its_key(tmp_path: Path) -> None:
    good, file = tmp_path / "new" / "good", tmp_path / "file"
    file.touch()
    check_given([trial(max_restarts=1, checkpoint_dir=str(good))])
    assert list(good.iterdir()) == []
    bad = str(file / "below")
    check_given([trial(checkpoint_dir=bad), trial(max_restarts=1)])  # nothing is written
    with pytest.raises(InputError, match=r"limits\.checkpoint_dir: .*below on .*Not a directory"):
        check_given([trial(max_restarts=1, checkpoint_dir=bad)])
