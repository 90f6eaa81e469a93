"""Every test leaves the process as it found it: no thread, child, process group, variable, file."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.crashes import (  # noqa: F401  (pytest finds its hooks here)
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)
from tests.kept_engine import kept_engine  # noqa: F401  (a fixture)
from tests.workers import (  # noqa: F401  (pytest finds its hooks here)
    pytest_collection,
    pytest_collection_modifyitems,
    pytest_xdist_auto_num_workers,
    pytest_xdist_make_scheduler,
)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a shell: commands under test would ignore Ctrl-C, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported: two workers share two cores, and idle threads of OpenMP spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("any machine", deadline=None, max_examples=30)  # a busy one, too
settings.load_profile("any machine")

GRACE_SECONDS = 20.0
"""Time for things that end by themselves a moment later, such as a data loader's worker."""

SET_BY_LIBRARIES = (
    *("PYTEST_", "KMP_", "OMP_", "TORCH", "CUDA_", "NCCL_", "DS_", "TRITON_"),
    "PYTORCH_NVML_",
)
"""Importing torch or DeepSpeed for the first time sets some of these."""

Look = Callable[[], set[str]]


def threads() -> set[str]:
    """Python's threads; those that torch keeps for its operators are not among them."""
    return {f"thread {thread.name} ({thread.ident})" for thread in threading.enumerate()}


def children() -> set[str]:
    """Child processes, zombies included; none of those that Python keeps for itself."""
    kept = {_kept_by_python("resource_tracker", "_resource_tracker", "_pid")}
    kept.add(_kept_by_python("forkserver", "_forkserver", "_forkserver_pid"))
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= set((task / "children").read_text().split())
        except OSError:
            continue  # the thread has ended meanwhile
    return {f"child process {pid}" for pid in found if int(pid) not in kept}


def process_group() -> set[str]:
    """Looked for where torch is loaded, so that tests without it stay fast."""
    torch = sys.modules.get("torch.distributed")
    alive = torch is not None and torch.is_available() and torch.is_initialized()
    return {"process group"} if alive else set()


def variables() -> set[str]:
    return {
        f"environment variable {name}={value}"
        for name, value in os.environ.items()
        if not name.startswith(SET_BY_LIBRARIES)
    }


def files() -> set[str]:
    """Files in the current folder, without caches."""
    caches = ("__pycache__",)
    return {
        f"file {name} in {Path.cwd()}"
        for name in os.listdir()  # noqa: PTH208  (names are all that is needed, often)
        if not name.startswith(".") and name not in caches
    }


def _kept_by_python(module: str, holder: str, attribute: str) -> int | None:
    loaded = sys.modules.get(f"multiprocessing.{module}")
    pid: int | None = getattr(getattr(loaded, holder, None), attribute, None)
    return pid


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    looks: tuple[Look, ...] = (threads, children, process_group, variables, files)
    before = [look() for look in looks]
    yield
    leaks = _leaks(looks, before)
    if leaks:
        gc.collect()  # what only a cycle keeps alive is no leak
        deadline = time.monotonic() + GRACE_SECONDS
        while (leaks := _leaks(looks, before)) and time.monotonic() < deadline:
            time.sleep(0.02)
    assert not leaks, f"the test leaves behind: {', '.join(leaks)}"


def _leaks(looks: tuple[Look, ...], before: list[set[str]]) -> list[str]:
    return [
        leak for look, known in zip(looks, before, strict=True) for leak in sorted(look() - known)
    ]
