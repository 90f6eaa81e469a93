"""How the parameters are shared among servers and cut into buckets."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from shardmark.strategies.parameter_server.buckets import Partition, partition_parameters

WIDTHS = (3, 17, 8, 31, 5, 2)


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(WIDTHS)), nn.BatchNorm1d(2))


def names(partition: Partition) -> list[str]:
    return [segment.name for part in partition for bucket in part for segment in bucket.segments]


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
@pytest.mark.parametrize("bucket_bytes", [0, 100, 600, 10**9])
def test_every_trainable_parameter_is_held_once(servers: int, bucket_bytes: int) -> None:
    made = model()
    partition = partition_parameters(made, servers=servers, bucket_bytes=bucket_bytes, wire="fp32")
    assert len(partition) == servers
    assert sorted(names(partition)) == sorted(name for name, _ in made.named_parameters())
    sizes = dict(made.named_parameters())
    for bucket in (bucket for part in partition for bucket in part):
        ends = [0, *(segment.end for segment in bucket.segments)]
        assert [segment.start for segment in bucket.segments] == ends[:-1], "no gap, no overlap"
        assert bucket.elements == ends[-1]
        for segment in bucket.segments:
            assert segment.end - segment.start == sizes[segment.name].numel()
            assert segment.shape == sizes[segment.name].shape
        assert len(bucket.segments) == 1 or bucket.elements * 4 <= bucket_bytes


@pytest.mark.parametrize("servers", [2, 3, 5])
def test_servers_are_balanced_by_bytes(servers: int) -> None:
    made = model()
    partition = partition_parameters(made, servers=servers, bucket_bytes=600, wire="fp32")
    held = [sum(bucket.wire_bytes for bucket in part) for part in partition]
    largest = max(p.numel() for p in made.parameters()) * 4
    assert max(held) <= sum(held) / servers + largest
    assert min(held) > 0


def test_is_the_same_on_every_rank() -> None:
    first, second = (
        partition_parameters(model(), servers=3, bucket_bytes=600, wire="bf16") for _ in range(2)
    )
    assert first == second


def test_frozen_parameters_stay_with_the_workers() -> None:
    made = model()
    frozen = next(iter(made.children()))
    frozen.requires_grad_(False)
    held = names(partition_parameters(made, servers=2, bucket_bytes=600, wire="fp32"))
    assert set(held) == {n for n, p in made.named_parameters() if p.requires_grad}
    assert len(held) == len(list(made.parameters())) - 2


def test_last_layers_come_first() -> None:
    """Their gradients are ready first."""
    made = model()
    expected = [name for name, _ in made.named_parameters()][::-1]
    assert names(partition_parameters(made, servers=1, bucket_bytes=600, wire="fp32")) == expected


def test_shared_parameters_are_held_once() -> None:
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    made[1].weight = made[0].weight
    assert sorted(names(partition_parameters(made, servers=2, bucket_bytes=64, wire="fp32"))) == [
        "0.bias",
        "0.weight",
        "1.bias",
    ]


def test_wire_halves_the_bytes_and_not_the_buckets() -> None:
    whole = partition_parameters(model(), servers=1, bucket_bytes=600, wire="fp32")
    half = partition_parameters(model(), servers=1, bucket_bytes=600, wire="bf16")
    assert [b.segments for b in half[0]] == [b.segments for b in whole[0]]
    assert [b.wire_bytes * 2 for b in half[0]] == [b.wire_bytes for b in whole[0]]
    assert {b.wire_type for b in half[0]} == {torch.bfloat16}


def test_servers_without_a_parameter_hold_no_bucket() -> None:
    """The strategy refuses such a partition."""
    partition = partition_parameters(nn.Linear(2, 2), servers=3, bucket_bytes=600, wire="fp32")
    assert [len(part) for part in partition] == [1, 1, 0]


def test_place_is_a_view() -> None:
    bucket = partition_parameters(nn.Linear(2, 3), servers=1, bucket_bytes=600, wire="fp32")[0][0]
    flat = torch.arange(float(bucket.elements))
    bias, weight = (segment.of(flat) for segment in bucket.segments)
    assert bias.tolist() == [0, 1, 2]
    assert weight.tolist() == [[3, 4], [5, 6], [7, 8]]
    weight.zero_()
    assert flat.tolist() == [0, 1, 2, 0, 0, 0, 0, 0, 0]
