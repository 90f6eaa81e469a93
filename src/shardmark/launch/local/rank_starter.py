"""What a node needs of whoever forks the ranks of its trials.  Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from shardmark.core.machine import Machine
from shardmark.launch.engine import Task


class RankStarter(Protocol):
    """Forks the ranks of one trial at a time, on one machine."""

    def machine(self, device: str) -> Machine:
        """What `device` means on this machine.  `InputError` if it cannot be had."""

    def load(self, modules: Sequence[str], device_type: str) -> None:
        """Import what every rank needs, and these; `ShardmarkError` where torch cannot be had."""

    def begin(self, directory: Path, task: Task, variables: Mapping[str, str]) -> None:
        """Start a trial's ranks, with these environment variables on top."""

    def ended(self, timeout_seconds: float) -> int | None:
        """The trial's exit code; None if it has not ended within that time."""

    def reap(self) -> int:
        """End the trial's processes; an exit code."""

    def close(self) -> None: ...
