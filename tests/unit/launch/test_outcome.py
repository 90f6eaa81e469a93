"""How a trial ended, decided from what its ranks and its processes left."""

from __future__ import annotations

import errno
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from shardmark.core.errors import DataError, InputError, StrategyUnavailable, error_kind
from shardmark.launch import outcome
from shardmark.launch.outcome import (
    MEMORY_REMEDY,
    Ending,
    LostNode,
    ProcessEnd,
    decide,
    describe,
    kernel_oom_kills,
    on_node,
)
from shardmark.results.schema import Failure, Outcome, RankError, RankRecord
from tests.golden.invented import invented_rank

CPU_MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
)
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
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out_of_memory"),
        (StrategyUnavailable("ddp", "no", "two"), "unavailable"),
        (DataError("train", "no pictures", "add some"), "data"),
        (InputError("workload.model", "a list", "a tensor"), "input"),
        (OSError(errno.ENOSPC, "No space left on device"), "exception"),
        (RuntimeError("Connection closed by peer"), "exception"),
        (ValueError("CUDA out of memory is only quoted here"), "exception"),
    ],
)
def test_error_kind(error: BaseException, kind: str) -> None:
    assert error_kind(error) == kind


def test_torch_s_own_error_is_known() -> None:
    """The real message of the allocator of this torch."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert error_kind(caught.value) == "out_of_memory"


def ending(
    how: Literal["exited", "timed_out", "interrupted"] = "exited",
    code: int | None = 0,
    failures: Sequence[tuple[int, int, float]] = (),
    oom_kills: int = 0,
) -> Ending:
    """`failures` are rank, exit code and time."""
    ends = tuple(ProcessEnd(rank=r, exit_code=c, at_seconds=at) for r, c, at in failures)
    return Ending(how=how, agent_exit_code=code, failures=ends, oom_kills=oom_kills)


def record(rank: int, kind: Any = None, message: str = "", **error: Any) -> RankRecord:
    if kind is None:
        return invented_rank(rank)
    told = RankError(kind=kind, message=message, **{"at_seconds": 10.0, **error})
    return invented_rank(rank).model_copy(update={"error": told})


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
LOST_WORKER = record(1).model_copy(update={"lost": "was ended by SIGKILL"})


@pytest.mark.parametrize(
    ("end", "ranks", "expected"),
    [
        pytest.param(ending(), [record(0), record(1)], (Outcome.OK, "", None), id="done"),
        pytest.param(
            ending(), [record(0), LOST_WORKER], (Outcome.OK, "", None), id="others trained on"
        ),
        pytest.param(
            ending("interrupted", -9, [(0, -9, 1.0)], oom_kills=1),
            [NO_MEMORY],
            (Outcome.INTERRUPTED, "interrupted by the user", None),
            id="an interrupt comes before whatever else happened",
        ),
        pytest.param(
            ending(code=1, failures=[(0, 1, 4.0), (1, 1, 10.0)]),
            [PEER_GONE, NO_MEMORY],
            (OUT_OF_MEMORY, "rank 1: MemoryError: none", 1),
            id="out of memory is the cause though others reported first",
        ),
        pytest.param(
            ending("timed_out", -9),
            [PEER_GONE, NO_MEMORY],
            (OUT_OF_MEMORY, "rank 1: MemoryError: none", 1),
            id="others that wait for it until the deadline change nothing",
        ),
        pytest.param(
            ending(code=1),
            [record(0, "out_of_memory", "MemoryError: ", at_seconds=12.0), NO_MEMORY],
            (OUT_OF_MEMORY, "rank 1: MemoryError: none", 1),
            id="first of several ranks out of memory",
        ),
        pytest.param(
            ending(code=1, failures=[(1, -9, 3.5)], oom_kills=1),
            [PEER_GONE],
            (OUT_OF_MEMORY, "the kernel killed rank 1 for want of memory", 1),
            id="kernel's kill",
        ),
        pytest.param(
            ending(code=1, failures=[(0, 1, 5.0)], oom_kills=1),
            [BAD_VALUE],
            (FAILED, "rank 0: ValueError: bad", 0),
            id="kernel's kill of somebody else is no excuse",
        ),
        pytest.param(
            ending(code=-9, oom_kills=1),
            [],
            (OUT_OF_MEMORY, "the kernel killed the launcher for want of memory", None),
            id="kernel's kill of the launcher",
        ),
        pytest.param(
            ending(code=1, failures=[(1, -11, 3.5), (0, 1, 4.0)]),
            [PEER_GONE],
            (FAILED, "rank 1 was ended by SIGSEGV", 1),
            id="signal is the cause of the others' errors",
        ),
        pytest.param(
            ending(code=1, failures=[(1, -6, 3.5), (0, 1, 4.0)]),
            [PEER_GONE],
            (FAILED, "rank 1 was ended by SIGABRT", 1),
            id="abort that came first",
        ),
        pytest.param(
            ending(code=1, failures=[(0, 1, 3.99), (1, -9, 4.02)]),
            [PEER_GONE],
            (FAILED, "rank 1 was ended by SIGKILL", 1),
            id="kill noticed a little late on another node",
        ),
        pytest.param(
            ending(code=1, failures=[(0, 1, 4.01), (1, -6, 4.05)]),
            [BAD_VALUE],
            (FAILED, "rank 0: ValueError: bad", 0),
            id="library aborts because a peer is gone",
        ),
        pytest.param(
            ending(code=1, failures=[(0, 1, 4.0), (1, -9, 7.0)]),
            [BAD_VALUE],
            (FAILED, "rank 0: ValueError: bad", 0),
            id="the launcher kills a rank in a collective seconds later",
        ),
        pytest.param(
            ending(code=1, failures=[(1, -signal.SIGTERM, 3.0), (0, 1, 4.0)]),
            [BAD_VALUE],
            (FAILED, "rank 0: ValueError: bad", 0),
            id="SIGTERM is the launcher's",
        ),
        pytest.param(
            ending(code=1),
            [BAD_VALUE, record(1, "data", "DataError: no pictures", at_seconds=3.0)],
            (FAILED, "rank 1: DataError: no pictures", 1),
            id="first error",
        ),
        pytest.param(
            replace(ending(code=1), clocks_ahead_seconds={1: -5.0}),
            [BAD_VALUE, record(1, "data", "DataError: no pictures", at_seconds=3.0)],
            (FAILED, "rank 0: ValueError: bad", 0),
            id="first error by one clock",
        ),
        pytest.param(
            ending(code=1),
            [record(0, "unavailable", "StrategyUnavailable: no compiler")],
            (Outcome.UNAVAILABLE, "rank 0: StrategyUnavailable: no compiler", 0),
            id="unavailable",
        ),
        pytest.param(
            ending(code=1, failures=[(1, 3, 5.0), (0, 1, 6.0)]),
            [],
            (FAILED, "rank 1 ended with exit code 3", 1),
            id="exit code where a rank left nothing else",
        ),
        pytest.param(
            replace(ending(code=1), lost=LostNode(node=1, host="b", reason="silent for 20 s")),
            [BAD_VALUE],
            (FAILED, "node 1 (b) was lost: silent for 20 s", None),
            id="lost node, whatever the others say of it",
        ),
        pytest.param(
            ending(code=-9),
            [],
            (FAILED, "the launcher ended with code -9 and 0 of 2 ranks finished", None),
            id="launcher's death",
        ),
        pytest.param(
            ending(code=0),
            [record(0)],
            (FAILED, "the launcher ended with code 0 and 1 of 2 ranks finished", None),
            id="missing rank",
        ),
        pytest.param(
            ending(code=1),
            [record(0, "exception", "\n \n" + "x" * 600 + "\nstack")],
            (FAILED, f"rank 0: {'x' * 500}", 0),
            id="first line of a message",
        ),
        pytest.param(
            ending(code=1),
            [record(0, "exception", "\n")],
            (FAILED, "rank 0: no message", 0),
            id="no message",
        ),
    ],
)
def test_decision(
    end: Ending, ranks: Sequence[RankRecord], expected: tuple[Outcome, str, int | None]
) -> None:
    assert decided(end, ranks) == expected


@pytest.mark.parametrize(
    ("progress", "places", "rank"),
    [
        ((7, 5), "rank 0 had taken 7 steps, rank 1 had taken 5 steps", 1),
        ((7, None), "rank 0 had taken 7 steps, rank 1 had not begun", None),
        ((None, None), "rank 0 had not begun, rank 1 had not begun", None),
    ],
)
def test_timeout_says_how_far_each_rank_came(
    progress: Sequence[int | None], places: str, rank: int | None
) -> None:
    outcome, reason, blamed = decided(ending("timed_out", -9, [(0, -9, 61.0)]), [], progress)
    assert (outcome, blamed) == (Outcome.TIMED_OUT, rank)
    assert reason == f"not done after limits.trial_seconds = 60 s: {places}"


def test_a_rank_s_own_remedy_is_told() -> None:
    rank = record(1, "data", "DataError: no pictures", remedy="add some")
    _, failure = decide(ending(code=1), [rank], processes=2, trial_seconds=60, progress=())
    assert failure is not None
    assert failure.remedy == "add some"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "was ended by SIGKILL"),
        (-40, "was ended by signal 40"),
        (3, "ended with exit code 3"),
    ],
)
def test_description(code: int, words: str) -> None:
    assert describe(code) == words


def test_a_failure_names_the_node_of_its_rank() -> None:
    failure = on_node(Failure(reason="rank 3 was ended by SIGKILL", rank=3), 1, "b")
    assert failure.reason == "rank 3 was ended by SIGKILL (rank 3 is on node 1, b)"
    assert failure.node == 1


def test_kernel_oom_kills(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A counter of the machine; kernels before 4.13 have none."""
    vmstat = tmp_path / "vmstat"
    monkeypatch.setattr(outcome, "Path", lambda _: vmstat)
    assert kernel_oom_kills() == 0
    vmstat.write_text("nr_free_pages 12\n")
    assert kernel_oom_kills() == 0
    vmstat.write_text("nr_free_pages 12\noom_kill 4\n")
    assert kernel_oom_kills() == 4
