"""Parts of a model that torch's first FSDP may shard by themselves."""

from __future__ import annotations

from torch import nn

from shardmark.ranks.strategies.fsdp1.worker import without_shared_parameters


def test_parts_that_share_a_parameter_stay_with_the_root() -> None:
    """Tied weights in separate units would be two, and trained apart without a message."""
    embedding, head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    head.weight = embedding.weight
    block = nn.Linear(4, 4)
    twice = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    twice[2].weight = twice[0].weight
    model = nn.Sequential(embedding, block, twice, head)
    assert without_shared_parameters(model, [embedding, block, twice, head]) == {block, twice}
