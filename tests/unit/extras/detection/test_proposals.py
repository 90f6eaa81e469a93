"""Proposals are drawn uniformly, from a stream of each picture's own."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from scipy.special import chdtr
from torch import Tensor
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler

from shardmark.base.layout import Shard
from shardmark.extras.detection.proposals import PictureSampler
from shardmark.extras.detection.task import Detection
from shardmark.ranks.workloads.base import BatchPlan
from shardmark.ranks.workloads.order import seed_of
from tests.unit.extras.detection.detection_data import TWO_STAGES, task, write

CPU = torch.device("cpu")


def sampler(size: int = 8, stream: int = 0) -> PictureSampler:
    return PictureSampler(size, 0.25, stream, of_anchors=True)


def choose(
    made: PictureSampler, seeds: list[int], matched: list[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    made.seeds = seeds
    positive, negative = made(matched)
    return list(zip(positive, negative, strict=True))


def matches(positive: int, negative: int, ignored: int = 3) -> Tensor:
    """Candidates of each kind, in an order that mixes them."""
    counted = [(2, positive), (0, negative), (-1, ignored)]
    values = torch.tensor([value for value, number in counted for _ in range(number)])
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    return values[order].float()  # torchvision's heads give int64, its proposal network floats


@pytest.mark.parametrize(
    ("positive", "negative", "expected"),
    [(20, 20, (2, 6)), (1, 20, (1, 7)), (0, 20, (0, 8)), (20, 3, (2, 3)), (0, 0, (0, 0))],
)
def test_sample_sizes_equal_those_of_torchvision(
    positive: int, negative: int, expected: tuple[int, int]
) -> None:
    matched = matches(positive, negative)
    theirs = BalancedPositiveNegativeSampler(8, 0.25)([matched])
    before = torch.get_rng_state()
    (chosen,) = choose(sampler(), [5], [matched])
    assert torch.equal(torch.get_rng_state(), before)
    for mask, others, kind in zip(chosen, theirs, (matched >= 1, matched == 0), strict=True):
        assert (mask.dtype, mask.shape) == (others[0].dtype, matched.shape)
        assert mask.sum() == others[0].sum()
        assert not (mask.bool() & ~kind).any(), "objects and background are not confused"
    assert tuple(int(mask.sum()) for mask in chosen) == expected


def test_choice_is_uniform() -> None:
    """Counts of what is chosen, for many seeds, against a uniform draw without replacement."""
    matched, pictures = matches(12, 30, 5), 1000
    seeds = [seed_of(0, "proposals", number) for number in range(pictures)]
    chosen = choose(sampler(), seeds, [matched] * pictures)
    for which, kind, wanted in ((0, matched >= 1, 2), (1, matched == 0, 6)):
        counts = torch.stack([pair[which].double() for pair in chosen]).sum(0)[kind]
        share = wanted / len(counts)
        spread = pictures * share * (1 - share) * len(counts) / (len(counts) - 1)
        distance = float(((counts - pictures * share) ** 2).sum()) / spread
        assert 0.001 < chdtr(len(counts) - 1, distance) < 0.999


def test_choice_depends_on_seed_and_stream_alone() -> None:
    made, matched = sampler(), [matches(n, 40 - n) for n in (3, 9, 0, 20)]
    seeds = [11, 12, 13, 14]
    together = choose(made, seeds, matched)
    alone = [choose(made, [seed], [one])[0] for seed, one in zip(seeds, matched, strict=True)]
    turned = choose(made, seeds[::-1], matched[::-1])[::-1]
    for one, other, third in zip(together, alone, turned, strict=True):
        assert all(map(torch.equal, one, other))
        assert all(map(torch.equal, one, third))
    many = [matches(100, 500)]
    first, by_seed, by_stream = (
        choose(sampler(64, stream), [seed], many)[0][1]
        for seed, stream in ((8, 0), (20, 0), (8, 1))
    )
    assert not torch.equal(first, by_seed)
    assert not torch.equal(first, by_stream)


def test_draws_are_recorded() -> None:
    made, told = sampler(), list[str]()
    made.record = told.append
    matched = [matches(5, 20), matches(6, 20)]
    choose(made, [7, 9], matched)
    assert [line.split("/")[:2] for line in told] == [["0", "7"], ["0", "9"]]
    choose(made, [7, 7], matched)
    assert told[2] == told[0] != told[3]
    made.of_anchors = False
    choose(made, [7], [matched[0]])
    assert told[-1] == "0/7", "proposals depend on rounding"


def drawn(made: Detection, shards: int) -> tuple[str, ...]:
    """Draws of a step of four pictures, shared among ranks that one model computes in turn."""
    model = made.build_model()
    told = made.watch_draws()
    plan = BatchPlan(global_batch=4, seed=1)
    with torch.no_grad():
        for index in range(shards):
            for batch in islice(made.batches(plan, Shard(index=index, count=shards)), 2):
                made.loss(model, batch.to(CPU))
    draws = told()
    assert told() == (), "it is told once"
    return draws


@pytest.mark.usefixtures("_own_cache")
def test_anchors_are_the_same_for_every_number_of_ranks(tmp_path: Path) -> None:
    made = task(write(tmp_path / "data", sizes=[(48, 32)]), model=TWO_STAGES)
    alone = drawn(made, 1)
    assert len(alone) == 16, "8 pictures, 2 samplers"
    assert len({line for line in alone if line.count("/") == 2}) == 8
    assert drawn(made, 2) == drawn(made, 4) == alone
