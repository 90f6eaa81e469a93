"""Makes a rank slower than its machine: for studies of uneven workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def slowed(
    factor: float,
    *,
    busy_seconds: Callable[[], float] | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> Callable[[], AbstractContextManager[object]]:
    """A context around each step that lasts `factor` times what the rank computes in it.

    Computing is what the thread that trains is busy with: waiting for others does not count, else
    a slow rank would slow itself down further.  On CUDA the thread only starts kernels, so there
    it is the device's time between the ends of the step, waiting included.
    """
    if factor <= 1:
        return nullcontext
    clock = busy_seconds or _busy_seconds()

    @contextmanager
    def pace() -> Iterator[None]:
        started = clock()
        yield
        sleep((factor - 1) * (clock() - started))

    return pace


def _busy_seconds() -> Callable[[], float]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return time.thread_time

    def after_the_device() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return after_the_device
