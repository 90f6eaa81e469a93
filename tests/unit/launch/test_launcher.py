"""What is asked of the machine, and the order in which a launcher's children end: without any."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from shardmark.core.errors import ShardmarkError
from shardmark.launch.local import fork_server
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


def test_a_gpu_that_torch_cannot_use_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a V100 with wheels of today: each trial would fail in its first kernel."""
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_name": lambda index: ("NVIDIA H200", "Tesla V100-SXM2-16GB")[index],
        "get_device_capability": lambda index: ((9, 0), (7, 0))[index],
        "get_arch_list": lambda: ["sm_75", "sm_90", "compute_90"],
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(fork_server, "cuda_libraries", tuple)
    assert fork_server._machine("cpu").device_type == "cpu"
    for device in ("auto", "cuda"):
        with pytest.raises(ShardmarkError, match=r"V100-SXM2-16GB \(sm_70\).*CUDA_VISIBLE_DEVICES"):
            fork_server._machine(device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert fork_server._machine("auto").device_count == 2
