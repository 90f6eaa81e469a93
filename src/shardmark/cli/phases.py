"""Progress of commands without a live display: a line for each phase."""

from __future__ import annotations

import time

from shardmark.base.text import say


class PhaseLines:
    """Prints a line to standard error as each phase begins, with the seconds since the start."""

    def __init__(self) -> None:
        self._began_at_seconds = time.monotonic()

    def __call__(self, phase: str) -> None:
        elapsed_seconds = time.monotonic() - self._began_at_seconds
        say(f"[{elapsed_seconds:3.0f} s] {phase}", error=True)
