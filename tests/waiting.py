"""Waits for an event, however slow the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")
PATIENCE_SECONDS = 240.0
"""Less than the time limit of a test, so that the failure names the condition."""


def wait_for(condition: Callable[[], Found], seconds: float = PATIENCE_SECONDS) -> Found:
    """Return what the condition gives as soon as it holds."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"in vain for {seconds:g} s"
        time.sleep(0.02)
    return found
