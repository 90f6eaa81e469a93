"""A group whose library crashed once runs again and is told of; one that crashes again fails."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from torch.multiprocessing.spawn import ProcessExitedException

from shardmark.ranks.strategies.base import RankContext
from tests import crashes
from tests.distributed.ranks import run_ranks


def crashes_until(process: RankContext, runs: Path, needed: int) -> int:
    if process.rank == 1:
        (runs / f"{len(list(runs.iterdir()))}").touch()
        if len(list(runs.iterdir())) < needed:
            os.kill(os.getpid(), signal.SIGSEGV)
    return process.rank


def test_a_crash_of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("tests.distributed.ranks.CRASHES", told)
    for name in ("once", "always", "runs", "more"):
        (tmp_path / name).mkdir()
    arguments = crashes_until, tmp_path / "runs", 2
    assert run_ranks(*arguments, world_size=2, directory=tmp_path / "once") == [0, 1]
    with pytest.raises(ProcessExitedException, match="SIGSEGV"):
        run_ranks(
            *(crashes_until, tmp_path / "more", 3), world_size=2, directory=tmp_path / "always"
        )
    assert len(told) == 2
    assert "Segmentation fault" in told[0], "with the stack"
    assert not crashes.CRASHES, "nothing else crashed"
