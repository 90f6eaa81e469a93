"""The order in which a launcher's children end, without any child."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from shardmark.launch.local.launcher import DeathWatch


class Enough(Exception):  # noqa: N818  (no error: the end of the test's events)
    pass


def test_first_death_comes_first_and_each_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = SimpleNamespace(si_pid=12, si_code=os.CLD_KILLED, si_status=9)
    failed = SimpleNamespace(si_pid=11, si_code=os.CLD_EXITED, si_status=1)
    crashed = SimpleNamespace(si_pid=13, si_code=os.CLD_DUMPED, si_status=11)
    not_begun, not_reaped_yet = ChildProcessError(), killed
    events = Mock(side_effect=[not_begun, killed, not_reaped_yet, failed, crashed, Enough()])
    monkeypatch.setattr(os, "waitid", events)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)
    watch = DeathWatch()
    with pytest.raises(Enough):
        watch._watch()
    ends = [(death.pid, death.exit_code) for death in watch.deaths]
    assert ends == [(12, -9), (11, 1), (13, -11)]
