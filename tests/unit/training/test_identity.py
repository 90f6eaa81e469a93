"""Hashes: equal for equal content, different for any difference."""

from __future__ import annotations

import torch

from shardmark.train.identity import sample_order_sha256, weights_sha256

TENSORS = {
    "weight": torch.arange(6.0).view(2, 3),
    "scalar": torch.tensor(1.5),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "count": torch.tensor([1, 2]),
    "none": torch.empty(0),
}


def test_weights_hash_knows_names_shapes_types_and_values() -> None:
    original = weights_sha256(TENSORS)
    assert len(original) == 64
    changed = [
        {**TENSORS, "weight": TENSORS["weight"] + 1e-6},
        {**TENSORS, "weight": TENSORS["weight"].view(3, 2)},
        {**TENSORS, "count": TENSORS["count"].int()},
        {**TENSORS, "half": TENSORS["half"].half()},
        {("weights" if name == "weight" else name): t for name, t in TENSORS.items()},
        {name: tensor for name, tensor in TENSORS.items() if name != "none"},
    ]
    assert len({original, *map(weights_sha256, changed)}) == len(changed) + 1


def test_weights_hash_ignores_order_strides_and_gradients() -> None:
    original = weights_sha256(TENSORS)
    assert weights_sha256(dict(reversed(TENSORS.items()))) == original
    transposed = TENSORS["weight"].t().contiguous().t()
    assert not transposed.is_contiguous()
    parameter = torch.nn.Parameter(transposed)
    assert weights_sha256({**TENSORS, "weight": parameter}) == original


def test_sample_order_knows_samples_order_and_steps() -> None:
    orders = [((1, 2), (3,)), ((1,), (2, 3)), ((2, 1), (3,)), ((1, 2, 3),), ((1, 2), (3,), ()), ()]
    assert len({sample_order_sha256(order) for order in orders}) == len(orders)
    assert sample_order_sha256(((1, 2), (3,))) == sample_order_sha256([(1, 2), (3,)])
