"""Parameters are shared among servers and cut into buckets."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from shardmark.extras.parameter_server.buckets import (
    ALIGNED_ELEMENTS,
    Partition,
    partition_parameters,
)
from shardmark.ranks.workloads.base import ParameterGroup

WIDTHS = (3, 17, 8, 31, 5, 2)


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(WIDTHS)), nn.BatchNorm1d(2))


def names(partition: Partition) -> list[str]:
    return [segment.name for part in partition for bucket in part for segment in bucket.segments]


@pytest.mark.parametrize("servers", [1, 2, 5])
@pytest.mark.parametrize("bucket_bytes", [0, 600, 10**9])
def test_every_parameter_is_held_once_by_servers_balanced_by_bytes(
    servers: int, bucket_bytes: int
) -> None:
    """Buckets are views that vectorised kernels like, whatever the wire's precision."""
    made = model()
    partition, half = (
        partition_parameters(made, servers=servers, bucket_bytes=bucket_bytes, wire=wire)
        for wire in ("fp32", "bf16")
    )
    sizes = dict(made.named_parameters())
    assert len(partition) == servers
    assert sorted(names(partition)) == sorted(sizes)
    assert names(half) == names(partition)
    for bucket, in_bf16 in zip(sum(partition, ()), sum(half, ()), strict=True):
        ends = [0, *(segment.end for segment in bucket.segments)]
        starts = [-(-end // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS for end in ends[:-1]]
        assert [segment.start for segment in bucket.segments] == starts, "no overlap"
        assert bucket.elements == ends[-1]
        assert len(bucket.segments) == 1 or bucket.elements * 4 <= bucket_bytes
        assert (in_bf16.wire_bytes * 2, in_bf16.wire_type) == (bucket.wire_bytes, torch.bfloat16)
        flat = bucket.flat(sizes)
        views = {segment.name: segment.view(flat) for segment in bucket.segments}
        assert all(view.data_ptr() % 64 == 0 for view in views.values())
        assert all(torch.equal(view, sizes[name]) for name, view in views.items())
        assert flat.abs().sum() == pytest.approx(sum(v.abs().sum().item() for v in views.values()))
    held = [sum(bucket.wire_bytes for bucket in part) for part in partition]
    assert min(held) > 0
    padding = len(sizes) * ALIGNED_ELEMENTS
    assert max(held) <= sum(held) / servers + 4 * (max(p.numel() for p in sizes.values()) + padding)
    if servers == 1:
        assert names(partition) == [*sizes][::-1], "the last layers' gradients are ready first"


def test_bucket_holds_one_parameter_group() -> None:
    sizes = dict(model().named_parameters())
    flat = frozenset(name for name, p in sizes.items() if p.dim() < 2)
    groups = [ParameterGroup(names=names, options={}) for names in (frozenset(sizes) - flat, flat)]
    partition = partition_parameters(
        model(), servers=2, bucket_bytes=10**9, wire="fp32", groups=groups
    )
    assert sorted(names(partition)) == sorted(sizes)
    for part in partition:
        kinds = [{segment.name in flat for segment in bucket.segments} for bucket in part]
        assert kinds == [{False}, {True}]


def test_frozen_parameters_are_left_out_and_shared_ones_held_once() -> None:
    """The frozen stay with the workers; what two layers share is held once."""
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    made[1].weight = made[0].weight
    made[2].requires_grad_(False)
    partition = partition_parameters(made, servers=2, bucket_bytes=64, wire="fp32")
    assert sorted(names(partition)) == ["0.bias", "0.weight", "1.bias"]
    many = partition_parameters(made, servers=4, bucket_bytes=64, wire="fp32")
    assert [bool(part) for part in many] == [True] * 3 + [False], "the strategy refuses such"
