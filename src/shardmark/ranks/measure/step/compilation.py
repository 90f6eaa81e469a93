"""Measures the time that torch.compile takes, and counts compilations in measured windows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from torch._dynamo.callback import callback_handler  # torch has no public place for it


class Compilation:
    """Counts, while it is entered, every compilation in this process.  A window observer."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = 0.0
        self._measured = False
        self.seconds = 0.0
        """Time of all compilations: tracing, generating and compiling code, or loading cached code.
        A backward pass is compiled when it first runs."""
        self.in_windows = 0
        """Compilations that happened during measured steps."""

    def __enter__(self) -> Self:
        callback_handler.register_start_callback(self._begun)
        callback_handler.register_end_callback(self._done)
        return self

    def __exit__(self, *_: object) -> None:
        callback_handler.remove_start_callback(self._begun)
        callback_handler.remove_end_callback(self._done)

    def window_started(self) -> None:
        self._measured = True

    def window_stopped(self) -> None:
        self._measured = False

    def _begun(self, _: object) -> None:
        """Called when an outermost compilation begins."""
        self._started = self._clock()
        self.in_windows += self._measured

    def _done(self, _: object) -> None:
        """Called when an outermost compilation ends."""
        self.seconds += self._clock() - self._started
