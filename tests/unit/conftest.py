"""Fixtures that all unit tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from typer import main as typer_main


@pytest.fixture(scope="module", autouse=True)
def _disk_is_not_waited_for() -> Iterator[None]:
    """No test loses power: thousands of small runs would wait for the disk longer than they work.

    What must be flushed, and in which order, is tested by replacing `fsync` once more.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _command_line_is_built_once() -> Iterator[None]:
    """Typer would read the signatures of all verbs anew at each of hundreds of calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer_main, "get_command", cache(typer_main.get_command))
        yield


@pytest.fixture
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDMARK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def detection_folder(tmp_path: Path, _own_cache: None) -> Path:
    """Six pictures of three sizes in each split."""
    from tests.unit.extras.detection import detection_data

    return detection_data.write(tmp_path / "data")


@pytest.fixture
def coco_folder(tmp_path: Path, _own_cache: None) -> Path:
    """Four pictures in each split, with one of each oddity."""
    from tests.unit.extras.detection import detection_data

    return detection_data.write_odd(tmp_path / "data")
