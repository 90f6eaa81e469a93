"""The outcome of a trial follows from what its ranks and its processes left."""

from __future__ import annotations

import errno
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import DistBackendError

from shardmark.base.errors import FULL, DataError, InputError, StrategyUnavailable, error_kind
from shardmark.base.results.schema import Outcome, RankError, RankRecord
from shardmark.bench.launch import outcome
from shardmark.bench.launch.outcome import (
    MEMORY_REMEDY,
    Ending,
    LostNode,
    decide,
    explain_mismatch,
    kernel_oom_kills,
)
from tests import present
from tests.golden.invented import invented_rank
from tests.unit.bench.launch.fakes import FAILED as FAILED_ENDING
from tests.unit.bench.launch.fakes import FINE, TIMED_OUT, ending

CPU_MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
)
NCCL = "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.27.3\nLast error:\n{}"
CUDNN_9 = "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
FAILED = Outcome.FAILED
OUT_OF_MEMORY = Outcome.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "out_of_memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (RuntimeError(CPU_MESSAGE), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), "out_of_memory"),
        (RuntimeError("CUDA error: out of memory"), "out_of_memory"),
        (RuntimeError("CUDA driver error: out of memory"), "out_of_memory"),
        (DistBackendError(NCCL.format("Cuda failure 2 'out of memory'")), "out_of_memory"),
        (
            DistBackendError(NCCL.format("Failed to CUDA calloc async 608 bytes")),
            "out_of_memory",
        ),
        (DistBackendError(NCCL.format("Cuda failure 700 'illegal access'")), "exception"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `x`"), "out_of_memory"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "out_of_memory"),
        (RuntimeError(f"cuDNN error: {CUDNN_9}"), "out_of_memory"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "exception"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out_of_memory"),
        (StrategyUnavailable("ddp", "no", "two"), "unavailable"),
        (DataError("train", "no pictures", "add some"), "data"),
        (InputError("workload.model", "a list", "a tensor"), "input"),
        *((OSError(number, "of a disk"), "storage") for number in FULL),
        (OSError(errno.ETIMEDOUT, "of a connection"), "exception"),
        (RuntimeError("Connection closed by peer"), "exception"),
        (ValueError("CUDA out of memory is only quoted here"), "exception"),
    ],
)
def test_error_kind(error: BaseException, kind: str) -> None:
    assert error_kind(error) == kind


def record(rank: int, kind: Any = None, message: str = "", **error: Any) -> RankRecord:
    if kind is None:
        return invented_rank(rank)
    rank_error = RankError(kind=kind, message=message, **{"at_seconds": 10.0, **error})
    return invented_rank(rank).model_copy(update={"error": rank_error})


def decided(
    end: Ending, ranks: Sequence[RankRecord], progress: Sequence[int | None] = (3, 3)
) -> tuple[Outcome, str, int | None]:
    """Outcome, reason and rank of a trial of two ranks."""
    outcome, failure = decide(end, ranks, processes=2, trial_seconds=60, progress=progress)
    assert (failure is None) == (outcome is Outcome.OK)
    if failure is None:
        return outcome, "", None
    assert failure.remedy
    assert (failure.remedy == MEMORY_REMEDY) == (outcome is OUT_OF_MEMORY)
    return outcome, failure.reason, failure.rank


PEER_GONE = record(0, "exception", "RuntimeError: Connection closed by peer", at_seconds=4.0)
BAD_VALUE = record(0, "exception", "ValueError: bad", at_seconds=4.0)
NO_MEMORY = record(1, "out_of_memory", "MemoryError: none\n\nException raised from x")
NO_DATA = record(1, "data", "DataError: none", at_seconds=3.0)
BY_BAD_VALUE = (FAILED, "rank 0: ValueError: bad", 0)
LOST_WORKER = record(1).model_copy(update={"lost": "was ended by SIGKILL"})


DECISIONS: dict[str, tuple[Ending, list[RankRecord], tuple[Outcome, str, int | None]]] = {
    "done": (FINE, [record(0), record(1)], (Outcome.OK, "", None)),
    "others trained on": (FINE, [record(0), LOST_WORKER], (Outcome.OK, "", None)),
    "an interrupt comes before whatever else happened": (
        ending("interrupted", -9, [(0, -9, 1.0)], oom_kills=1),
        [NO_MEMORY],
        (Outcome.INTERRUPTED, "interrupted by the user", None),
    ),
    "out of memory is the cause though others reported first": (
        ending(code=1, failures=[(0, 1, 4.0), (1, 1, 10.0)]),
        [PEER_GONE, NO_MEMORY],
        (OUT_OF_MEMORY, "rank 1: MemoryError: none", 1),
    ),
    "others that wait for it until the deadline change nothing": (
        TIMED_OUT,
        [PEER_GONE, NO_MEMORY],
        (OUT_OF_MEMORY, "rank 1: MemoryError: none", 1),
    ),
    "first of several ranks out of memory": (
        FAILED_ENDING,
        [record(0, "out_of_memory", "MemoryError: ", at_seconds=12.0), NO_MEMORY],
        (OUT_OF_MEMORY, "rank 1: MemoryError: none", 1),
    ),
    "kernel's kill": (
        ending(code=1, failures=[(1, -9, 3.5)], oom_kills=1),
        [PEER_GONE],
        (OUT_OF_MEMORY, "the kernel killed rank 1, because memory ran out", 1),
    ),
    "kernel's kill of somebody else is no excuse": (
        ending(code=1, failures=[(0, 1, 5.0)], oom_kills=1),
        [BAD_VALUE],
        BY_BAD_VALUE,
    ),
    "kernel's kill of the launcher": (
        ending(code=-9, oom_kills=1),
        [],
        (OUT_OF_MEMORY, "the kernel killed the launcher, because memory ran out", None),
    ),
    "signal is the cause of the others' errors": (
        ending(code=1, failures=[(1, -11, 3.5), (0, 1, 4.0)]),
        [PEER_GONE],
        (FAILED, "rank 1 was ended by SIGSEGV", 1),
    ),
    "abort that came first": (
        ending(code=1, failures=[(1, -6, 3.5), (0, 1, 4.0)]),
        [PEER_GONE],
        (FAILED, "rank 1 was ended by SIGABRT", 1),
    ),
    "kill noticed a little late on another node": (
        ending(code=1, failures=[(0, 1, 3.99), (1, -9, 4.02)]),
        [PEER_GONE],
        (FAILED, "rank 1 was ended by SIGKILL", 1),
    ),
    "library aborts because a peer is gone": (
        ending(code=1, failures=[(0, 1, 4.01), (1, -6, 4.05)]),
        [BAD_VALUE],
        BY_BAD_VALUE,
    ),
    "the launcher kills a rank in a collective seconds later": (
        ending(code=1, failures=[(0, 1, 4.0), (1, -9, 7.0)]),
        [BAD_VALUE],
        BY_BAD_VALUE,
    ),
    "SIGTERM is the launcher's": (
        ending(code=1, failures=[(1, -signal.SIGTERM, 3.0), (0, 1, 4.0)]),
        [BAD_VALUE],
        BY_BAD_VALUE,
    ),
    "first error": (FAILED_ENDING, [BAD_VALUE, NO_DATA], (FAILED, "rank 1: DataError: none", 1)),
    "first error by one clock": (
        replace(FAILED_ENDING, clocks_ahead_seconds={1: -5.0}),
        [BAD_VALUE, NO_DATA],
        BY_BAD_VALUE,
    ),
    "unavailable": (
        FAILED_ENDING,
        [record(0, "unavailable", "StrategyUnavailable: no compiler")],
        (Outcome.UNAVAILABLE, "rank 0: StrategyUnavailable: no compiler", 0),
    ),
    "exit code where a rank left nothing else": (
        ending(code=1, failures=[(0, 1, 6.0), (1, 3, 5.0)]),
        [],
        (FAILED, "rank 1 ended with exit code 3", 1),
    ),
    "signal without a name": (
        ending(code=1, failures=[(1, -40, 5.0)]),
        [],
        (FAILED, "rank 1 was ended by signal 40", 1),
    ),
    "lost node, whatever the others say of it": (
        replace(FAILED_ENDING, lost=LostNode(node=1, host="b", reason="silent for 20 s")),
        [BAD_VALUE],
        (FAILED, "node 1 (b) was lost: silent for 20 s", None),
    ),
    "launcher's death": (
        ending(code=-9),
        [],
        (FAILED, "the launcher was ended by SIGKILL; 0 of 2 ranks had finished", None),
    ),
    "launcher's death, whatever ranks of another node met": (
        ending(code=-9, failures=[(0, 1, 4.0)]),
        [PEER_GONE],
        (FAILED, "the launcher was ended by SIGKILL; 0 of 2 ranks had finished", None),
    ),
    "missing rank": (
        FINE,
        [record(0)],
        (FAILED, "the launcher ended with exit code 0; 1 of 2 ranks had finished", None),
    ),
    "first line of a message": (
        FAILED_ENDING,
        [record(0, "exception", "\n \n" + "x" * 600 + "\nstack")],
        (FAILED, f"rank 0: {'x' * 500}", 0),
    ),
    "no message": (
        FAILED_ENDING,
        [record(0, "exception", "\n")],
        (FAILED, "rank 0: no message", 0),
    ),
}


@pytest.mark.parametrize("case", DECISIONS)
def test_decision(case: str) -> None:
    end, ranks, expected = DECISIONS[case]
    assert decided(end, ranks) == expected


@pytest.mark.parametrize(
    ("progress", "places", "rank"),
    [
        ((7, 5), "rank 0 had taken 7 steps, rank 1 had taken 5 steps", 1),
        ((7, None), "rank 0 had taken 7 steps, rank 1 had not begun", None),
        ((None, None), "rank 0 had not begun, rank 1 had not begun", None),
    ],
)
def test_timeout_reports_the_steps_of_each_rank(
    progress: Sequence[int | None], places: str, rank: int | None
) -> None:
    outcome, reason, blamed = decided(TIMED_OUT, [], progress)
    assert (outcome, blamed) == (Outcome.TIMED_OUT, rank)
    assert reason == f"not done after limits.trial_seconds = 60 s: {places}"


def test_remedy_of_a_rank_is_used() -> None:
    rank = record(1, "data", "DataError: no pictures", remedy="add some")
    _, failure = decide(FAILED_ENDING, [rank], processes=2, trial_seconds=60, progress=())
    assert present(failure).remedy == "add some"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("[enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 4 vs 2", True),
        ("Is there a distributed collective mismatch in your code?", True),
        ("Connection closed by peer", False),
    ],
)
def test_gloo_mismatch_is_explained(line: str, named: bool) -> None:
    _, failure = decide(
        ending("exited", 1, [(1, -6, 1.0)]), [], processes=2, trial_seconds=60, progress=()
    )
    explained = explain_mismatch(present(failure), ["loading", line])
    assert explained.reason.startswith("rank 1 was ended by SIGABRT")
    assert ("different parts of the model" in explained.reason) == named
    assert ("multiplied by zero" in str(explained.remedy)) == named


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("ValueError: no samples", False),
        ("RuntimeError: Connection closed by peer [127.0.0.1]", True),
        ("RuntimeError: op.preamble.length <= op.nbytes. 4 vs 2", True),
    ],
)
def test_error_of_a_rank_is_not_replaced(message: str, named: bool) -> None:
    """Whatever gloo says of a mismatch after it."""
    _, failure = decide(
        FAILED_ENDING, [record(1, "exception", message)], processes=2, trial_seconds=60, progress=()
    )
    explained = explain_mismatch(present(failure), ["op.preamble.length <= op.nbytes. 4 vs 2"])
    assert ("different parts of the model" in explained.reason) == named
    assert (message in explained.reason) != named


def test_kernel_oom_kills(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A counter of the machine; kernels before 4.13 have none."""
    vmstat = tmp_path / "vmstat"
    monkeypatch.setattr(outcome, "Path", lambda _: vmstat)
    assert kernel_oom_kills() == 0
    vmstat.write_text("nr_free_pages 12\n")
    assert kernel_oom_kills() == 0
    vmstat.write_text("nr_free_pages 12\noom_kill 4\n")
    assert kernel_oom_kills() == 4
