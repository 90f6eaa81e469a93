"""How the parameters are shared among servers and cut into buckets."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from shardmark.strategies.parameter_server.buckets import (
    ALIGNED_ELEMENTS,
    Partition,
    partition_parameters,
)
from shardmark.workloads.base import ParameterGroup

WIDTHS = (3, 17, 8, 31, 5, 2)


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(WIDTHS)), nn.BatchNorm1d(2))


def names(partition: Partition) -> list[str]:
    return [segment.name for part in partition for bucket in part for segment in bucket.segments]


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
@pytest.mark.parametrize("bucket_bytes", [0, 100, 600, 10**9])
def test_every_parameter_is_held_once_by_servers_balanced_by_bytes(
    servers: int, bucket_bytes: int
) -> None:
    made = model()
    partition = partition_parameters(made, servers=servers, bucket_bytes=bucket_bytes, wire="fp32")
    sizes = dict(made.named_parameters())
    assert len(partition) == servers
    assert sorted(names(partition)) == sorted(sizes)
    for bucket in (bucket for part in partition for bucket in part):
        ends = [0, *(segment.end for segment in bucket.segments)]
        starts = [-(-end // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS for end in ends[:-1]]
        assert [segment.start for segment in bucket.segments] == starts, "no overlap"
        assert bucket.elements == ends[-1]
        assert all(segment.shape == sizes[segment.name].shape for segment in bucket.segments)
        assert len(bucket.segments) == 1 or bucket.elements * 4 <= bucket_bytes
    held = [sum(bucket.wire_bytes for bucket in part) for part in partition]
    assert min(held) > 0
    padding = len(sizes) * ALIGNED_ELEMENTS
    assert max(held) <= sum(held) / servers + 4 * (max(p.numel() for p in sizes.values()) + padding)
    if servers == 1:
        assert names(partition) == [*sizes][::-1], "the last layers' gradients are ready first"


def test_a_bucket_is_of_one_group() -> None:
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


def test_frozen_and_shared_parameters() -> None:
    """The frozen stay with the workers; what two layers share is held once."""
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    made[1].weight = made[0].weight
    made[2].requires_grad_(False)
    held = names(partition_parameters(made, servers=2, bucket_bytes=64, wire="fp32"))
    assert sorted(held) == ["0.bias", "0.weight", "1.bias"]


def test_wire_halves_the_bytes_and_not_the_buckets() -> None:
    (whole,), (half,) = (
        partition_parameters(model(), servers=1, bucket_bytes=600, wire=w) for w in ("fp32", "bf16")
    )
    assert [b.segments for b in half] == [b.segments for b in whole]
    assert [b.wire_bytes * 2 for b in half] == [b.wire_bytes for b in whole]
    assert {b.wire_type for b in half} == {torch.bfloat16}


def test_servers_without_a_parameter_hold_no_bucket() -> None:
    """The strategy refuses such a partition."""
    partition = partition_parameters(nn.Linear(2, 2), servers=3, bucket_bytes=600, wire="fp32")
    assert [len(part) for part in partition] == [1, 1, 0]


def test_parameters_are_aligned_views_of_their_bucket() -> None:
    """Vectorised kernels fall back to single elements on others."""
    made = model()
    named = dict(made.named_parameters())
    (buckets,) = partition_parameters(made, servers=1, bucket_bytes=10**9, wire="fp32")
    for bucket in buckets:
        flat = bucket.flat(named)
        views = {segment.name: segment.of(flat) for segment in bucket.segments}
        assert all(view.data_ptr() % 64 == 0 for view in views.values())
        assert all(torch.equal(view, named[name]) for name, view in views.items())
        assert flat.abs().sum() == pytest.approx(sum(v.abs().sum().item() for v in views.values()))
