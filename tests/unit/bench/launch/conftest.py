"""Fixtures that the tests of launching share."""

from __future__ import annotations

import pytest

from shardmark.bench.launch import session, verification

HERE = {"host": "here", "cuda": {"devices": [], "visible": []}}


@pytest.fixture(autouse=True)
def _no_look_at_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks git and watches other processes for a while."""
    for module in (session, verification):
        monkeypatch.setattr(module, "environment", lambda: dict(HERE))
