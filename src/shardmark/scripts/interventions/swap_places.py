"""Exchanges the places of the ranks: the cores that they are pinned to, or their devices."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

from shardmark.scripts.interventions.base import Intervention


class SwapPlaces(Intervention):
    """Each rank takes the cores of the next one, or starts on the next one's device."""

    def install(self) -> None:
        self.swapped = False
        local, count = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        if torch.cuda.is_available() and torch.cuda.device_count() >= count > 1:
            os.environ["LOCAL_RANK"] = str((local + 1) % count)
            self.swapped = True

    def begin(self) -> None:
        cores_before = os.sched_getaffinity(0)
        cores = self.place.exchange(
            "cores", cores_before, (self.place.rank + 1) % self.place.world_size
        )
        self.swapped |= cores != cores_before
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended, or the cores are of another machine
                os.sched_setaffinity(int(thread.name), cores)

    def facts(self) -> dict[str, object]:
        return {"swapped": self.swapped}
