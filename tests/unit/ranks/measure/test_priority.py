"""Threads that watch ranks are scheduled behind them, and normally again afterwards."""

from __future__ import annotations

import os
import threading

from shardmark.base.system.processes import schedule_as_batch, schedule_normally


def test_batch_scheduling_concerns_one_thread_and_can_be_reverted() -> None:
    policies = []

    def watch() -> None:
        schedule_as_batch()
        policies.append(os.sched_getscheduler(0))
        schedule_normally()
        policies.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert policies == [os.SCHED_BATCH, os.SCHED_OTHER]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
