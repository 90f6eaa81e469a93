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
    kernel_oom_kills,
)
from shardmark.results.schema import Failure, Outcome, RankError, RankRecord
from tests.golden.invented import invented_rank

CPU_MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
)


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
    ends = tuple(ProcessEnd(rank=r, exit_code=c, at_seconds=at) for r, c, at in failures)
    return Ending(how=how, agent_exit_code=code, failures=ends, oom_kills=oom_kills)


def record(rank: int, kind: Any = None, message: str = "", **error: Any) -> RankRecord:
    if kind is None:
        return invented_rank(rank)
    found = RankError(kind=kind, message=message, **{"at_seconds": 10.0, **error})
    return invented_rank(rank).model_copy(update={"error": found})


def decided(
    end: Ending, ranks: Sequence[RankRecord], progress: Sequence[int | None] = (3, 3)
) -> tuple[Outcome, Failure | None]:
    return decide(end, ranks, processes=2, trial_seconds=60, progress=progress)


def failure(reason: str, remedy: str = "see log.txt", rank: int | None = None) -> Failure:
    return Failure(reason=reason, remedy=remedy, rank=rank)


def test_all_ranks_done_is_ok() -> None:
    assert decided(ending(), [record(0), record(1)]) == (Outcome.OK, None)


def test_interrupt_comes_before_whatever_else_happened() -> None:
    end = ending("interrupted", -9, [(0, -9, 1.0)], oom_kills=1)
    assert decided(end, [record(0, "out_of_memory", "x")]) == (
        Outcome.INTERRUPTED,
        failure("interrupted by the user", "run again with the same --out to finish"),
    )


def test_rank_out_of_memory_is_the_cause_though_others_reported_first() -> None:
    ranks = [
        record(0, "exception", "RuntimeError: Connection closed by peer", at_seconds=9.0),
        record(1, "out_of_memory", "RuntimeError: can't allocate\n\nException raised from x"),
    ]
    expected = failure("rank 1: RuntimeError: can't allocate", MEMORY_REMEDY, 1)
    end = ending(code=1, failures=[(0, 1, 9.0), (1, 1, 10.0)])
    assert decided(end, ranks) == (Outcome.OUT_OF_MEMORY, expected)
    # Others that wait for it until the deadline change nothing.
    assert decided(ending("timed_out", -9), ranks) == (Outcome.OUT_OF_MEMORY, expected)


def test_first_of_several_ranks_out_of_memory_is_named() -> None:
    ranks = [
        record(0, "out_of_memory", "MemoryError: ", at_seconds=12.0),
        record(1, "out_of_memory", "MemoryError: ", at_seconds=11.0),
    ]
    found = decided(ending(code=1), ranks)[1]
    assert found is not None
    assert found.rank == 1


def test_kernel_s_kill_is_out_of_memory() -> None:
    end = ending(code=1, failures=[(1, -9, 5.0)], oom_kills=1)
    assert decided(end, [record(0, "exception", "Connection reset", at_seconds=5.0)]) == (
        Outcome.OUT_OF_MEMORY,
        failure("the kernel killed rank 1 for want of memory", MEMORY_REMEDY, 1),
    )


def test_kernel_s_kill_of_somebody_else_is_no_excuse() -> None:
    end = ending(code=1, failures=[(1, 1, 5.0)], oom_kills=1)
    assert decided(end, [record(0), record(1, "exception", "ValueError: x")])[0] is Outcome.FAILED


def test_kernel_s_kill_of_the_launcher_names_no_rank() -> None:
    found = decided(ending(code=-9, oom_kills=1), [])
    assert found[0] is Outcome.OUT_OF_MEMORY
    assert found[1] is not None
    assert found[1].rank is None
    assert "rank None" not in found[1].reason


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (11, "SIGSEGV"), (6, "SIGABRT")])
def test_signal_is_the_cause_of_the_others_errors(number: int, name: str) -> None:
    lost = record(0, "exception", "RuntimeError: Connection closed by peer", at_seconds=4.0)
    end = ending(code=1, failures=[(1, -number, 3.5), (0, 1, 4.0)])
    expected = failure(f"rank 1 was ended by {name}", rank=1)
    assert decided(end, [lost]) == (Outcome.FAILED, expected)


def test_a_kill_noticed_a_little_late_on_another_node_is_still_the_cause() -> None:
    lost = record(0, "exception", "RuntimeError: Connection closed by peer", at_seconds=3.98)
    end = ending(code=1, failures=[(0, 1, 3.99), (1, -9, 4.02)])
    expected = failure("rank 1 was ended by SIGKILL", rank=1)
    assert decided(end, [lost]) == (Outcome.FAILED, expected)


def test_a_library_that_aborts_because_a_peer_is_gone_is_no_cause() -> None:
    ranks = [record(0, "exception", "ValueError: bad", at_seconds=4.0)]
    end = ending(code=1, failures=[(0, 1, 4.01), (1, -6, 4.05)])
    assert decided(end, ranks) == (Outcome.FAILED, failure("rank 0: ValueError: bad", rank=0))


def test_signal_without_a_name_is_told_by_its_number() -> None:
    end = ending(code=1, failures=[(1, -40, 5.0)])
    found = decided(end, [record(0)])
    assert found[0] is Outcome.FAILED
    assert found[1] is not None
    assert "40" in found[1].reason


def test_sigkill_after_an_error_is_the_launcher_s_tidying_up_too() -> None:
    """A rank that waits in a collective is killed seconds after another one's error."""
    ranks = [record(0, "exception", "ValueError: bad", at_seconds=4.0)]
    end = ending(code=1, failures=[(0, 1, 4.0), (1, -9, 7.0)])
    assert decided(end, ranks) == (Outcome.FAILED, failure("rank 0: ValueError: bad", rank=0))


def test_sigterm_is_the_launcher_s_tidying_up() -> None:
    ranks = [record(0, "exception", "ValueError: bad", at_seconds=4.0)]
    end = ending(code=1, failures=[(1, -signal.SIGTERM, 3.0), (0, 1, 4.0)])
    assert decided(end, ranks) == (Outcome.FAILED, failure("rank 0: ValueError: bad", rank=0))


def test_first_error_is_told_with_its_remedy() -> None:
    ranks = [
        record(0, "exception", "RuntimeError: peer", at_seconds=6.0),
        record(1, "data", "DataError: no pictures", at_seconds=5.0, remedy="add some"),
    ]
    expected = failure("rank 1: DataError: no pictures", "add some", 1)
    assert decided(ending(code=1), ranks) == (Outcome.FAILED, expected)


def test_message_is_cut_to_its_first_line() -> None:
    ranks = [record(0, "exception", "\n \n" + "x" * 600 + "\nstack"), record(1)]
    assert decided(ending(code=1), ranks)[1] == failure(f"rank 0: {'x' * 500}", rank=0)
    assert decided(ending(code=1), [record(0, "exception", "\n")])[1] == failure(
        "rank 0: no message", rank=0
    )


def test_a_lost_worker_is_no_failure() -> None:
    """The others trained on, so that no process that the launcher watches has failed."""
    lost = record(1).model_copy(update={"lost": "was ended by SIGKILL"})
    assert decided(ending(code=0), [record(0), lost]) == (Outcome.OK, None)


def test_unavailable_in_a_rank_is_an_outcome() -> None:
    ranks = [record(0, "unavailable", "StrategyUnavailable: no compiler", remedy="get one")]
    expected = failure("rank 0: StrategyUnavailable: no compiler", "get one", 0)
    assert decided(ending(code=1), ranks) == (Outcome.UNAVAILABLE, expected)


def test_exit_code_is_told_where_a_rank_left_nothing_else() -> None:
    end = ending(code=1, failures=[(1, 3, 5.0), (0, 1, 6.0)])
    assert decided(end, []) == (Outcome.FAILED, failure("rank 1 ended with exit code 3", rank=1))


@pytest.mark.parametrize(
    ("code", "ranks", "reason"),
    [
        (-9, (), "the launcher ended with code -9 and 0 of 2 ranks finished"),
        (0, (0,), "the launcher ended with code 0 and 1 of 2 ranks finished"),
        (1, (0, 1), "the launcher ended with code 1 and 2 of 2 ranks finished"),
        (None, (0, 1), "the launcher ended with code None and 2 of 2 ranks finished"),
    ],
)
def test_launcher_s_death_and_missing_ranks(
    code: int | None, ranks: Sequence[int], reason: str
) -> None:
    found = decided(ending(code=code), [record(rank) for rank in ranks])
    assert found == (Outcome.FAILED, failure(reason))


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
    found = decided(ending("timed_out", -9, [(0, -9, 61.0)]), [], progress)
    reason = f"not done after limits.trial_seconds = 60 s: {places}"
    remedy = "raise limits.trial_seconds, or look in log.txt where each rank stood"
    assert found == (Outcome.TIMED_OUT, failure(reason, remedy, rank))


def test_kernel_oom_kills(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A counter of the machine; kernels before 4.13 have none."""
    vmstat = tmp_path / "vmstat"
    monkeypatch.setattr(outcome, "Path", lambda _: vmstat)
    assert kernel_oom_kills() == 0
    vmstat.write_text("nr_free_pages 12\n")
    assert kernel_oom_kills() == 0
    vmstat.write_text("nr_free_pages 12\noom_kill 4\n")
    assert kernel_oom_kills() == 4


def error_at(rank: int, at_seconds: float) -> RankRecord:
    error = RankError(kind="exception", message=f"error of {rank}", at_seconds=at_seconds)
    return invented_rank(rank).model_copy(update={"error": error})


def test_lost_node_is_the_reason_whatever_the_others_say_of_it() -> None:
    lost = LostNode(node=1, host="b", reason="nothing was heard for 20 s")
    outcome, failure = decided(replace(ending(code=1), lost=lost), [error_at(0, 1.0)])
    assert (outcome, failure) == (
        Outcome.FAILED,
        Failure(
            reason="node 1 (b) was lost: nothing was heard for 20 s",
            remedy="see whether the machine and the network to it are alive",
            node=1,
        ),
    )


def test_first_error_is_told_by_one_clock() -> None:
    """Rank 1's clock is behind: what it says was earlier was later."""
    ranks = (error_at(0, 10.0), error_at(1, 9.0))
    _, failure = decided(ending(code=1), ranks)
    assert failure is not None
    assert failure.rank == 1
    _, failure = decided(replace(ending(code=1), clocks_ahead_seconds={1: -5.0}), ranks)
    assert failure is not None
    assert failure.rank == 0
