"""Batches of ranks are put together to the batch that one process would get."""

from __future__ import annotations

import torch

from shardmark.scripts.batches import joined


def test_tensors_are_concatenated_in_every_structure() -> None:
    first = {"x": torch.ones(2, 3), "more": (torch.zeros(2), ["a", "b"])}
    second = {"x": torch.zeros(1, 3), "more": (torch.ones(1), ["c"])}
    batch = joined([first, second])
    assert batch["x"].tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]
    assert batch["more"][0].tolist() == [0.0, 0.0, 1.0]
    assert batch["more"][1] == ["a", "b", "c"]


def test_shorter_rows_are_padded_with_ignored_targets() -> None:
    batch = joined([torch.tensor([[1, -100, 2]]), torch.tensor([[3]])])
    assert batch.tolist() == [[1, -100, 2], [3, -100, -100]]


def test_pictures_of_other_sizes_stay_a_list() -> None:
    pictures = [torch.ones(3, size, size) for size in (4, 5, 6, 7)]
    targets = [{"boxes": torch.ones(n, 4)} for n in range(1, 5)]
    batch = joined([(pictures[:2], targets[:2]), (pictures[2:], targets[2:])], batch_size=2)
    assert [picture.shape[1] for picture in batch[0]] == [4, 5, 6, 7]
    assert [len(target["boxes"]) for target in batch[1]] == [1, 2, 3, 4]


def test_a_number_beside_tensors_stays_in_its_place() -> None:
    inputs, length = joined([(torch.ones(2, 3), 3), (torch.zeros(1, 3), 3)])
    assert len(inputs) == 3
    assert length == 3


def test_pairs_in_the_halves_of_a_batch_stay_in_halves() -> None:
    batches = [{"x": torch.tensor([1, 2, -1, -2])}, {"x": torch.tensor([3, -3])}]
    assert joined(batches)["x"].tolist() == [1, 2, -1, -2, 3, -3]
    assert joined(batches, halves=True)["x"].tolist() == [1, 2, 3, -1, -2, -3]


def test_tensors_of_other_dimensions_are_joined_flat() -> None:
    batch = joined([torch.tensor([[1, 2]]), torch.tensor([3])])
    assert batch.tolist() == [1, 2, 3]
    rows = joined([torch.ones(1, 2), torch.ones(1, 3)])
    assert rows.tolist() == [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
