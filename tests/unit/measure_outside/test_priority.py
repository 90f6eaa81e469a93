"""Watchers give way to ranks, and can come back."""

from __future__ import annotations

import os
import threading

from shardmark.core.processes import give_way, take_part


def test_a_thread_gives_way_alone_and_comes_back() -> None:
    policies = []

    def watch() -> None:
        give_way()
        policies.append(os.sched_getscheduler(0))
        take_part()
        policies.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert policies == [os.SCHED_BATCH, os.SCHED_OTHER]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
