"""A replay puts the ranks' random numbers together in the shape that one process asks for."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardmark.audit.replay import ReplayObserver, padded_draws
from shardmark.scripts.record import START, Draw, Record, Step
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
        steps = [Step(settings=[{"lr": rate}])]
        record = Record(rank=rank, ranks=2, optimizers=[0], steps=steps, draws=[draw])
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


def test_a_replayed_step_has_the_learning_rate_of_rank_0(replay: ReplayObserver) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    replay.optimizers.append(weakref.ref(optimizer))
    (group,) = optimizer.param_groups
    replay.before_step(optimizer)
    assert group["lr"] == 0.4
    replay.after_step(optimizer)
    assert group["lr"] == 0.1
    assert replay.record.steps[0].rates == [0.1]
