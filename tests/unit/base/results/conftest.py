"""Fixtures of tests of stored runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.invented import invented_trial, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Store a run with two repeats of a trial."""
    return write_run(tmp_path / "run", [invented_trial(repeat=0), invented_trial(repeat=1)])
