"""Looks at the main thread weigh what it does by its time."""

from __future__ import annotations

import time
from inspect import getsourcelines

import pytest

from shardmark.scripts.interventions import look
from shardmark.scripts.interventions.look import Look

SECONDS = 0.4


def busy_and_idle() -> float:
    """Compute in Python, which delays the looks, then wait; return Python's share of the time."""
    started, end = time.perf_counter(), time.perf_counter() + SECONDS
    while time.perf_counter() < end: 1 + 1  # fmt: skip  # noqa: B018, E701
    computed = time.perf_counter()
    time.sleep(SECONDS)
    return (computed - started) / (time.perf_counter() - started)


def test_looks_that_come_late_weigh_as_much_as_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "replace", lambda *_: None)
    looking = Look(None)
    looking.install()
    looking.begin()
    share = busy_and_idle()
    facts: dict[str, dict[str, list[tuple[str, float]]]] = looking.facts()  # type: ignore[assignment]
    _, first = getsourcelines(busy_and_idle)
    lines = {int(line.rpartition(":")[2]) - first: s for line, s in facts["lines"]["own_code"]}
    assert lines[3] == pytest.approx(share, abs=0.1)
    assert lines[5] == pytest.approx(1 - share, abs=0.1)
