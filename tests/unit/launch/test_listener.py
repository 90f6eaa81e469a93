"""What a reading says of several ranks."""

from __future__ import annotations

from shardmark.launch.listener import Reading
from shardmark.measure.step.progress import Reached


def rank(steps: int, loss: float | None = None, loss_steps: int | None = None) -> Reached:
    return Reached(steps=steps, total_steps=9, loss=loss, loss_steps=loss_steps)


def test_reading_is_of_the_furthest_rank_and_the_mean_loss() -> None:
    found = Reading.of([rank(3, 1.0, 3), rank(5, 2.0, 4), rank(2)], 7)
    assert found == Reading(steps=5, total_steps=9, loss=1.5, loss_steps=4, memory_bytes=7)


def test_what_no_rank_has_told_is_missing() -> None:
    found = Reading.of([rank(0)], None)
    assert (found.loss, found.loss_steps, found.memory_bytes) == (None, None, None)
