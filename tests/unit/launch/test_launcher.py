"""The order in which a launcher's children end, without any child."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from shardmark.launch.local.launcher import DeathWatch


class Enough(Exception):  # noqa: N818  (no error: the end of the test's events)
    pass


def test_first_death_comes_first_and_each_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def events() -> Iterator[object]:
        yield ChildProcessError()  # not begun
        yield SimpleNamespace(si_pid=12, si_code=os.CLD_KILLED, si_status=9)
        yield SimpleNamespace(si_pid=12, si_code=os.CLD_KILLED, si_status=9)  # not reaped yet
        yield SimpleNamespace(si_pid=11, si_code=os.CLD_EXITED, si_status=1)
        yield SimpleNamespace(si_pid=13, si_code=os.CLD_DUMPED, si_status=11)
        yield Enough()

    found = events()

    def waitid(*_: int) -> object:
        event = next(found)
        if isinstance(event, Exception):
            raise event
        return event

    monkeypatch.setattr(os, "waitid", waitid)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)
    watch = DeathWatch()
    with pytest.raises(Enough):
        watch._watch()
    assert [(death.pid, death.exit_code) for death in watch.deaths] == [
        (12, -9),
        (11, 1),
        (13, -11),
    ]
