"""What an engine is: it knows how to start the ranks of a trial somewhere.  Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

from shardmark.launch.outcome import Ending
from shardmark.strategies._protocol import Machine

Task = Literal["measure", "testify", "judge"]
"""What the ranks do: the trial itself, a few steps for `verify`, or (one process) the verdicts."""


class Engine(Protocol):
    """Starts trials, one at a time, and leaves none of their processes behind."""

    def machine(self, device: str) -> Machine:
        """What `device` (auto, cuda or cpu) means here.  `InputError` if it cannot be had."""

    def load(self, modules: Sequence[str], device_type: str) -> None:
        """Prepare for trials whose ranks import these modules."""

    def run(
        self,
        directory: Path,
        *,
        trial_seconds: float,
        on_tick: Callable[[], None],
        task: Task = "measure",
    ) -> Ending:
        """Run the trial described in the folder; `on_tick` is called a few times a second.

        Whatever happens, Ctrl-C included, the trial's processes are gone when it returns.
        """

    def close(self) -> None: ...
