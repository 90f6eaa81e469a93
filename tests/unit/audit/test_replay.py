"""A replay puts the ranks' random numbers together in the shape that one process asks for."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardmark.audit.guided import GuidedObserver
from shardmark.audit.replay import ReplayObserver, padded_draws
from shardmark.scripts.observer import Observer
from shardmark.scripts.record import START, Draw, Forward, Record, Step
from shardmark.scripts.recording import Plan, rank_file
from tests import present


def test_draws_of_batches_with_other_lengths_are_padded_as_the_batches_are() -> None:
    first, second = torch.ones(1, 2), torch.full((2, 3), 2.0)
    asked = torch.zeros(3, 3)
    together = present(padded_draws([first, second], asked))
    assert together.tolist() == [[1, 1, 0], [2, 2, 2], [2, 2, 2]]


def test_draws_longer_than_the_batch_of_one_process_do_not_match() -> None:
    assert padded_draws([torch.ones(1, 4), torch.ones(1, 2)], torch.zeros(2, 3)) is None


@pytest.fixture
def replay(tmp_path: Path) -> Iterator[ReplayObserver]:
    recorded = str(tmp_path / "recorded")
    for rank, rate in enumerate((0.4, 0.2)):
        draw = Draw(place="train.py:7", value=torch.full((1, 2), float(rank)))
        weights = Draw(place="model: net.py:3 < main.py:9 < launch.py:5", value=torch.ones(2))
        steps = [Step(settings=[{"lr": rate}])]
        record = Record(rank=rank, ranks=2, optimizers=[0], steps=steps, draws=[draw, weights])
        record.save(file := rank_file(recorded, rank))
        torch.save([torch.full((3,), float(rank))], file.with_suffix(START))
    plan = Plan(directory=str(tmp_path), recorded=recorded, order=(0, 1), steps=9)
    observer = ReplayObserver(plan)
    yield observer
    atexit.unregister(observer.write)


def test_a_draw_outside_of_the_model_is_replaced_by_those_of_all_ranks(
    replay: ReplayObserver,
) -> None:
    drawn = present(replay.draw("train.py:7", torch.full((2, 2), 9.0), own_seed=False))
    assert drawn.tolist() == [[0, 0], [1, 1]]
    assert replay.draw("train.py:7", torch.full((2, 2), 9.0), own_seed=False) is None


def test_ranks_that_the_script_starts_have_other_last_callers(replay: ReplayObserver) -> None:
    drawn = torch.zeros(2)
    assert replay.draw("model: net.py:4 < main.py:9 < launch.py:5", drawn, own_seed=False) is None
    place = "model: net.py:3 < main.py:9 < launch.py:8 < main.py:20"
    assert present(replay.draw(place, drawn, own_seed=False)).tolist() == [1, 1]


def test_a_replayed_step_has_the_learning_rate_of_rank_0(replay: ReplayObserver) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    replay.optimizers.append(weakref.ref(optimizer))
    (group,) = optimizer.param_groups
    replay.before_step(optimizer)
    assert group["lr"] == 0.4
    replay.after_step(optimizer)
    assert group["lr"] == 0.1
    assert replay.record.steps[0].rates == [0.1]


ROWS = torch.arange(8.0).reshape(4, 2)
"""Draws of a forward pass for four rows."""


def guided(folder: Path, a: list[list[torch.Tensor]], **plan: int) -> GuidedObserver:
    """An observer of a rank of B; each rank of A drew once in each of its forward passes."""
    recorded = str(folder / "recorded")
    for number, of_rank in enumerate(a):
        draws = {n: [value] for n, value in enumerate(of_rank)}
        record = Record(rank=number, ranks=len(a), forward_draws=draws)
        record.save(file := rank_file(recorded, number))
        torch.save([], file.with_suffix(START))
    plan_of_b: Any = {"directory": str(folder), "recorded": recorded, "steps": 9, **plan}
    observer = GuidedObserver(Plan(**plan_of_b))
    atexit.unregister(observer.write)
    return observer


@pytest.mark.parametrize(
    ("a", "plan", "drawn"),
    [
        ([[ROWS]], {"divided": 2}, [[ROWS[:2], ROWS[2:]]]),
        ([[ROWS]], {"divided": 2}, [[ROWS[:1], ROWS[2:3]], [ROWS[1:2], ROWS[3:]]]),
        ([[ROWS[:2], ROWS[2:]]], {"merged": 2}, [[ROWS]]),
        ([[ROWS[:2]], [ROWS[2:]]], {"divided": 4}, [[row[None] for row in ROWS]]),
        ([[ROWS[:, :1]], [ROWS]], {"divided": 2}, [[ROWS * torch.tensor([1, 0]), ROWS]]),
        ([[ROWS[0]]], {"divided": 2}, [[ROWS[0], ROWS[0]]]),  # these draws have no rows
        ([[ROWS, ROWS + 8]], {}, [[ROWS, ROWS + 8]]),
        ([[ROWS]], {"divided": 3}, [[None, None, None]]),
    ],
)
def test_draws_in_the_model_follow_the_rows_of_the_micro_batches(
    a: list[list[torch.Tensor]],
    plan: dict[str, int],
    drawn: list[list[torch.Tensor | None]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(len(drawn)))
    for rank, of_rank in enumerate(drawn):
        monkeypatch.setenv("RANK", str(rank))
        observer = guided(tmp_path, a, **plan)
        for forward, value in enumerate(of_rank):
            asked = torch.zeros(3, 2) if value is None else torch.zeros_like(value)
            found = observer._inside(forward, 0, "train.py:7", asked)
            assert (found is None) == (value is None)
            assert value is None or torch.equal(present(found), value)
        assert bool(observer.record.unmatched) == (of_rank[0] is None)


@pytest.mark.parametrize("stride", [1, 2])
def test_draws_for_other_rows_of_a_batch_are_not_matched(
    stride: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches of a batch are its halves, or its even and its odd rows."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    observer = guided(tmp_path, [[ROWS]], divided=2)
    forward = Forward(module="Net", inputs=[ROWS.sum(1)], outputs=[], rows=4, step=0)
    observer._ranks[0].forwards.append(forward)
    observer._inside(0, 0, "train.py:7", torch.zeros(2, 2))
    rows = ROWS[:2] if stride == 1 else ROWS[::2]
    sums = replace(forward, inputs=[rows.sum(1)])
    monkeypatch.setattr(Observer, "after_root", lambda self, *_: self.record.forwards.append(sums))
    observer.after_root(torch.nn.Identity(), rows, rows)
    assert observer.record.unmatched == ([] if stride == 1 else ["train.py:7"])


@pytest.mark.parametrize(
    ("rows", "batches", "drawn"),
    [(2, [ROWS[:2]], [ROWS[:1], ROWS[1:2]]), (1, [ROWS[:1], ROWS[2:3]], [ROWS[:1], ROWS[2:3]])],
    ids=["in its loop", "by its loader"],
)
def test_batches_are_divided_where_the_script_does_not_do_so(
    rows: int,
    batches: list[torch.Tensor],
    drawn: list[torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks get a batch of four rows of one rank, and take two micro-batches of it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    observer = guided(tmp_path, [[ROWS]], divided=2)
    found = list(observer._regrouped(iter([ROWS]), rows))
    assert list(map(torch.Tensor.tolist, found)) == list(map(torch.Tensor.tolist, batches))
    for forward, value in enumerate(drawn):
        assert torch.equal(present(observer._inside(forward, 0, "", torch.zeros(1, 2))), value)
