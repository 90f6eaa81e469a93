"""Models that end their trial in every way that a trial can end; rank 1 is the one to fail."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.distributed.models import small

CGROUP = Path("/sys/fs/cgroup/memory/shardmark-test")
CGROUP_BYTES = 600 * 2**20


class Misbehaving(nn.Module):
    """A small network that does something in rank 1's third forward pass."""

    def __init__(self, num_classes: int, act: Callable[[], object]) -> None:
        super().__init__()
        self.network = small(num_classes)
        self._act = act
        self._calls = 0

    def forward(self, pictures: Tensor) -> Tensor:
        self._calls += 1
        if self._calls == 3 and os.environ["RANK"] == "1":
            self._act()
        logits: Tensor = self.network(pictures)
        return logits


def model(act: Callable[[], object]) -> Callable[[int], nn.Module]:
    return lambda num_classes: Misbehaving(num_classes, act)


def _raise(error: Exception) -> None:
    raise error


killed = model(lambda: os.kill(os.getpid(), signal.SIGKILL))
outgrows_its_gpu = model(lambda: torch.empty(2**50, device="cuda"))
kills_the_launcher = model(lambda: os.kill(os.getppid(), signal.SIGKILL))
hangs = model(lambda: time.sleep(3600))
allocates_too_much = model(lambda: torch.empty(2**50))
raises = model(lambda: _raise(ValueError("the model does not like this picture")))
is_slow = model(lambda: time.sleep(2))  # so that somebody can interrupt it


def _hoard() -> None:
    (CGROUP / "cgroup.procs").write_text(str(os.getpid()))
    hoard = [torch.ones(2**24) for _ in range(64)]
    raise AssertionError(f"the kernel allowed {len(hoard)} x 64 MiB")


outgrows_its_cgroup = model(_hoard)
"""The kernel kills the process that holds more than its control group allows."""


def _fill_the_disk() -> None:
    """Until this process ends: the file has no name."""
    output = Path("/proc/self/fd/1").readlink()
    hoard = os.open(output.parent, os.O_TMPFILE | os.O_WRONLY)
    with suppress(OSError):
        while True:
            os.write(hoard, bytes(512))


fills_the_disk = model(_fill_the_disk)


class Slow(nn.Module):
    """Takes a tenth of a second for every pass, so that others can die meanwhile."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.network = small(num_classes)

    def forward(self, pictures: Tensor) -> Tensor:
        time.sleep(0.1)
        logits: Tensor = self.network(pictures)
        return logits


def server_dies(num_classes: int) -> nn.Module:
    """The third process, which serves, is gone two seconds after it has begun."""
    if os.environ["RANK"] == "2":
        timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    return Slow(num_classes)


def dies_at_start(num_classes: int) -> nn.Module:
    """The second process is gone before it has connected to the others."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return small(num_classes)
