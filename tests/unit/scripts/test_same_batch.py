"""Batches of the warm-up are returned again, as many as were loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shardmark.scripts.interventions import same_batch
from shardmark.scripts.interventions.same_batch import SameBatch


class Stream(IterableDataset[Tensor]):
    """Rows that end without a length."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(float(self.rows)))


@pytest.fixture
def same(monkeypatch: pytest.MonkeyPatch) -> SameBatch:
    for owner in (DataLoader, _BaseDataLoaderIter):
        for name in {"__iter__", "__next__", "__init__", "_reset"} & vars(owner).keys():
            monkeypatch.setattr(owner, name, vars(owner)[name])  # and back after the test
    same = SameBatch(None)
    same.install()
    return same


@pytest.mark.parametrize("warm", [True, False])
def test_a_stream_that_is_evaluated_ends(warm: bool, same: SameBatch) -> None:
    evaluated = DataLoader(Stream(6), 2)
    before = len([*evaluated]) if warm else 3
    same.begin()
    assert [len([*evaluated]) for _ in range(3)] == [before] * 3
    assert same.returned, "no later than after it has ended once"


def test_a_stream_that_trains_goes_on(same: SameBatch) -> None:
    batches = iter(DataLoader(Stream(6), 2))
    first = next(batches)
    same.begin()
    for _ in range(5):
        assert torch.equal(next(batches), first)
    assert same.facts() == {"returned": 5}


@pytest.mark.parametrize("warm", [True, False])
def test_generators_of_other_arguments_have_ends_of_their_own(warm: bool, same: SameBatch) -> None:
    @same.of_function
    def batches(split: str) -> Any:
        yield from range(100 if split == "train" else 3)

    training = batches("train")
    next(training)
    if warm:
        assert [*batches("validate")] == [0, 1, 2]
    same.begin()
    assert [*batches("validate")] == [0, 1, 2]
    assert [next(training) for _ in range(3)] == [0, 0, 0]


def test_a_generator_of_another_epoch_returns_the_batches_of_the_first(same: SameBatch) -> None:
    @same.of_function
    def batches(split: str, epoch: int) -> Any:
        yield from (f"{split} {epoch} {number}" for number in range(3))

    first = [*batches("train", 0)]
    assert [*batches("validate", 0)]
    same.begin()
    assert [*batches("train", 1)] == [*batches("train", 2)] == first
    assert same.returned == 6
    assert [*batches("test", 3)] == ["test 3 0", "test 3 1", "test 3 2"], "not known yet"


def test_few_batches_of_a_long_evaluation_are_kept(same: SameBatch) -> None:
    long: DataLoader[Tensor] = DataLoader(torch.arange(200.0), 2)  # type: ignore[arg-type]
    assert len([*long]) == 100
    (kept,) = same.kept_batches.values()
    assert len(kept) == same_batch.MOST_KEPT
    same.begin()
    assert len([*long]) == 100
