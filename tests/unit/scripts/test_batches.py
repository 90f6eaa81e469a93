"""Batches of ranks are put together to the batch that one process would get."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass

import pytest
import torch

from shardmark.scripts.batches import joined, leaves, padding_of


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
    batch = joined([(pictures[:2], targets[:2]), (pictures[2:], targets[2:])], size=2)
    assert [picture.shape[1] for picture in batch[0]] == [4, 5, 6, 7]
    assert [len(target["boxes"]) for target in batch[1]] == [1, 2, 3, 4]


class Padded:
    """Pictures with a mask, as DETR has them: an object that no library knows."""

    def __init__(self, rows: int) -> None:
        self.tensors, self.mask = torch.ones(rows, 3, 4, 4), torch.zeros(rows, 4, 4).bool()


def test_objects_with_tensors_are_joined_and_are_no_list_of_samples() -> None:
    targets = [({"boxes": torch.ones(n, 4)}, {"boxes": torch.ones(n + 1, 4)}) for n in (1, 3)]
    batch = joined([(Padded(2), targets[0]), (Padded(2), targets[1])], size=2)
    assert batch[0].tensors.shape == (4, 3, 4, 4)
    assert batch[0].mask.shape == (4, 4, 4)
    assert [len(target["boxes"]) for target in batch[1]] == [1, 2, 3, 4]
    assert [tensor.shape for tensor in leaves(batch[0])] == [(4, 3, 4, 4), (4, 4, 4)]


def test_objects_with_a_count_are_not_joined() -> None:
    """The count is one of their rows or targets: the loss may be divided by it."""
    for count in (2, torch.tensor(2)):
        parts = [Padded(2), Padded(2)]
        for part in parts:
            part.count = count  # type: ignore[attr-defined]
        assert joined(parts) is parts[0]


@dataclass
class Masked:
    values: torch.Tensor

    def __post_init__(self) -> None:
        self.mask = self.values > 0


def test_a_data_class_makes_its_other_attributes_again() -> None:
    assert joined([Masked(torch.ones(2, 3)), Masked(torch.zeros(1, 3))]).mask.shape == (3, 3)


def test_samples_without_an_entry_stay_a_list() -> None:
    batch = joined([(torch.ones(2, 3), [torch.ones(1), None])] * 2, size=2)
    assert [None if entry is None else len(entry) for entry in batch[1]] == [1, None, 1, None]


def test_a_number_beside_tensors_stays_in_its_place() -> None:
    inputs, length = joined([(torch.ones(2, 3), 3), (torch.zeros(1, 3), 3)])
    assert len(inputs) == 3
    assert length == 3


def test_pairs_and_triples_in_sections_of_a_batch_stay_in_sections() -> None:
    batches = [{"x": torch.tensor([1, 2, -1, -2])}, {"x": torch.tensor([3, -3])}]
    assert joined(batches)["x"].tolist() == [1, 2, -1, -2, 3, -3]
    assert joined(batches, sections=2)["x"].tolist() == [1, 2, 3, -1, -2, -3]
    assert joined(batches, sections=3)["x"].tolist() == [1, 2, -1, -2, 3, -3]
    triples = [torch.tensor([1, 2, 10, 20, 100, 200]), torch.tensor([3, 30, 300])]
    assert joined(triples, sections=3).tolist() == [1, 2, 3, 10, 20, 30, 100, 200, 300]


def test_tensors_of_other_dimensions_are_joined_flat() -> None:
    batch = joined([torch.tensor([[1, 2]]), torch.tensor([3])])
    assert batch.tolist() == [1, 2, 3]
    rows = joined([torch.ones(1, 2), torch.ones(1, 3)])
    assert rows.tolist() == [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]


def texts(*rows: list[int], left: bool, pad: int = 0) -> dict[str, torch.Tensor]:
    """Rows of tokens that are padded to the longest one, with their mask and their labels."""
    longest = max(map(len, rows))
    keys: dict[str, tuple[list[list[int]], int]]
    keys = {"ids": ([], pad), "mask": ([], 0), "labels": ([], -100)}
    for row in rows:
        values = {"ids": row, "mask": [1] * len(row), "labels": [-100, *row[1:]]}
        for key, (padded, value) in keys.items():
            padding = [value] * (longest - len(row))
            padded.append([*padding, *values[key]] if left else [*values[key], *padding])
    return {key: torch.tensor(padded) for key, (padded, _) in keys.items()}


ROWS = ([4, 5, 6, 7], [8, 9]), ([10, 11], [12, 13, 14, 15, 16, 17])
"""The texts of two ranks."""


@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize("left", [True, False])
def test_batches_are_padded_on_the_side_that_their_rows_are_padded_on(left: bool, pad: int) -> None:
    parts = [texts(*rows, left=left, pad=pad) for rows in ROWS]
    batch = joined(parts, padding=padding_of(parts))
    for key in ("ids", "mask", "labels"):
        alone = texts(*ROWS[0], *ROWS[1], left=left, pad=0)[key]
        assert torch.equal(batch[key] * batch["mask"], alone * batch["mask"])
        assert torch.equal(batch["mask"], texts(*ROWS[0], *ROWS[1], left=left)["mask"])
    assert batch["labels"].eq(-100).sum() == 4 + batch["mask"].eq(0).sum()


def test_prompts_on_the_left_and_answers_on_the_right_keep_their_sides() -> None:
    parts = [
        {f"{name}_{key}": value for name, left in (("prompt", True), ("answer", False))
         for key, value in texts(*(row if left else [*row, 9] for row in rows), left=left).items()}
        for rows in ROWS
    ]  # fmt: skip
    batch = joined(parts, padding=padding_of(parts))
    assert batch["prompt_mask"].tolist() == [
        [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1], [1] * 6,
    ]  # fmt: skip
    assert batch["answer_mask"].tolist() == [
        [1] * 5 + [0, 0], [1] * 3 + [0] * 4, [1] * 3 + [0] * 4, [1] * 7,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "rows",
    [
        [[[1, 1, 5, 6]], [[1, 1, 7]]],  # one row in each batch: no padding
        [
            [[1, 1, 5, 6], [1, 1, 7, 8]],
            [[1, 1, 9], [1, 1, 4]],
        ],  # all begin alike
        [[[5, 5, 6, 7], [8, 9, 4, 6]], [[6, 6, 5], [7, 4, 8]]],  # repeated by chance
        [[[0, 0, 1, 1], [0, 0, 0, 1]], [[0, 1, 1], [0, 0, 1]]],  # types of tokens
        [[[-100, -100, 7, 8], [-100, 6, 7, 8]], [[-100, -100, 5], [4, 5, 6]]],  # masked prompts
        [[[0, 0, 7], [5, 6, 7]], [[0, 0, 8], [4, 6, 8]]],  # one length: nothing is to be padded
    ],
)
def test_rows_that_show_no_padding_on_the_left_are_padded_on_the_right(
    rows: list[list[list[int]]],
) -> None:
    parts = [torch.tensor(of_rank) for of_rank in rows]
    assert not any(left for left, _ in padding_of(parts).values())


@pytest.mark.parametrize("left", [True, False])
def test_tokens_without_a_mask_are_padded_with_their_own_token(left: bool) -> None:
    parts = [texts(*rows, left=left, pad=3)["ids"] for rows in ROWS]
    expected = texts(*ROWS[0], *ROWS[1], left=left, pad=3)["ids"]
    assert torch.equal(joined(parts, padding=padding_of(parts)), expected)
    weights = [(part, part != 3, torch.rand(part.shape)) for part in parts]
    ids, mask, real = joined(weights, padding=padding_of(weights))
    assert torch.equal(ids * mask, expected * mask)
    assert ids.eq(0).sum() == 4, "what is added is 0: the mask tells"
    assert torch.equal(mask, expected != 3)
    assert ((real == 0).sum(1) == torch.tensor([2, 2, 0, 0])).all()


def test_tensors_are_seen_in_containers_that_torch_does_not_know() -> None:
    """Lightning calls DDP with (batch, index), and tokenizers make batches that are no dict."""

    @dataclass
    class Pair:
        first: torch.Tensor
        second: UserDict[str, torch.Tensor]

    ids, labels = torch.ones(2, 3), torch.zeros(2)
    batch = UserDict({"ids": ids, "length": torch.tensor(3)})
    for container in (batch, (batch, 0), [{"inner": batch}], Pair(labels, batch)):
        shapes = [tensor.shape for tensor in leaves(container)]
        assert shapes[-1] == ids.shape
        assert len(shapes) == 1 + isinstance(container, Pair)
