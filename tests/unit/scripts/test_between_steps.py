"""Evaluations, checkpoints and prints are taken away wherever a script or a library calls them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from shardmark.scripts.interventions.between_steps import NoCheckpoint

if TYPE_CHECKING:
    import pytest


def test_nothing_is_saved_by_functions_that_were_imported_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Trainer imports `save_file` so.  An empty file may be renamed, as a whole one is."""
    saved: list[Any] = []

    def save_file(_: object, filename: object) -> None:
        saved.append(filename)

    def save(_: object, f: object) -> None:
        saved.append(f)

    library, user = ModuleType("safetensors.torch"), ModuleType("trainer")
    vars(library)["save_file"] = save_file
    vars(user).update(save_weights=save_file, save_state=save)
    for module in (library, user, ModuleType("torch.distributed.checkpoint")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch, "save", save)
    NoCheckpoint(None).begin()
    user.save_weights({}, filename=tmp_path / "weights")
    user.save_state({}, str(tmp_path / "state"))
    torch.save({}, tmp_path / "whole")
    assert not saved
    assert {path.name for path in tmp_path.iterdir()} == {"weights", "state", "whole"}
    storage = torch.zeros(1).untyped_storage()
    user.save_state(storage, "pickled")
    assert saved == ["pickled"]
