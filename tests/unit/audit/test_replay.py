"""A replay puts the ranks' random numbers together in the shape that one process asks for."""

from __future__ import annotations

import torch

from shardmark.audit.replay import padded_draws


def test_draws_of_batches_with_other_lengths_are_padded_as_the_batches_are() -> None:
    first, second = torch.ones(1, 2), torch.full((2, 3), 2.0)
    asked = torch.zeros(3, 3)
    together = padded_draws([first, second], asked)
    assert together is not None
    assert together.tolist() == [[1, 1, 0], [2, 2, 2], [2, 2, 2]]


def test_draws_longer_than_the_batch_of_one_process_do_not_match() -> None:
    assert padded_draws([torch.ones(1, 4), torch.ones(1, 2)], torch.zeros(2, 3)) is None
