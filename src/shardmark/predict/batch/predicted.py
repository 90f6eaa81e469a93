"""Finds the largest batch that fits into memory, from predictions that real steps correct."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardmark.ranks.costs import cost_model
from shardmark.ranks.costs.base import Cell
from shardmark.ranks.trial import Trial

MOST_SAMPLES = 2**20
"""Largest batch of a rank that is tried."""
MOST_TRIES = 4
BEYOND = 1.05
"""Fraction of the room that a step is assumed to need if it ran out of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """Result of real steps with one batch."""

    samples: int
    """Samples of a pass on one rank."""
    peak_bytes: float | None
    """None if it ran out of memory."""
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """Largest batch of one cell of the matrix."""

    cell: Trial
    room_bytes: float
    """Memory for a rank's tensors."""
    most: int = MOST_SAMPLES
    """Samples that the training set has for a pass on one rank."""
    predicted: int | None = None
    """Predicted samples of a pass on one rank, before the first try."""
    tries: tuple[Try, ...] = ()
    reason: str | None = None
    """Reason why there is no result."""

    @property
    def best(self) -> Try | None:
        """The largest batch that fitted."""
        fitting = [one for one in self.tries if one.fits]
        return max(fitting, key=lambda one: one.samples, default=None)

    @property
    def per_rank_batch(self) -> int | None:
        """Value of `recipe.per_rank_batch`, which counts all passes."""
        return None if self.best is None else self.best.samples * passes_of(self.cell)

    @property
    def samples_of_step(self) -> int | None:
        """Samples of a step over all ranks, some of which see the same samples."""
        batch = self.per_rank_batch
        return None if batch is None else batch * self.cell.layout.shares

    @property
    def predicted_batch(self) -> int | None:
        """Predicted value of `recipe.per_rank_batch`."""
        return None if self.predicted is None else self.predicted * passes_of(self.cell)


def passes_of(cell: Trial) -> int:
    """A rank's batch is a multiple of it: passes of accumulation, or a pipeline's micro-batches."""
    costs = cost_model(cell.built_strategy)
    ranks = Cell(recipe=cell.recipe, world_size=cell.world_size, nodes=cell.nodes)
    return cell.recipe.gradient_accumulation * costs.num_microbatches(ranks)


def next_samples(
    predicted_bytes: Callable[[int], float], room_bytes: float, tries: Sequence[Try], most: int
) -> int | None:
    """Return the next batch to try; None if a larger batch is not expected to fit.

    The prediction is shifted to agree with the last try; after two, the line through both counts.
    """
    fitting = max((one.samples for one in tries if one.fits), default=0)
    failing = min((one.samples for one in tries if not one.fits), default=most + 1)
    if failing - fitting <= 1 or len(tries) == MOST_TRIES:
        return None
    points = [
        (one.samples, BEYOND * room_bytes if one.peak_bytes is None else one.peak_bytes)
        for one in tries
    ]
    guess = min(most, largest(_through(points, predicted_bytes), room_bytes))
    if fitting and guess <= fitting:
        return None
    return min(max(guess, fitting + 1), failing - 1)


def _through(
    points: Sequence[tuple[int, float]], predicted_bytes: Callable[[int], float]
) -> Callable[[int], float]:
    """Bytes by samples: the prediction, shifted to the last point, or the line through two."""
    if not points:
        return predicted_bytes
    at, seen = points[-1]
    if len(points) > 1:
        before, less = points[-2]
        if (slope := (seen - less) / (at - before)) > 0:
            return lambda samples: seen + slope * (samples - at)
    off = seen - predicted_bytes(at)
    return lambda samples: predicted_bytes(samples) + off


def largest(bytes_of: Callable[[int], float], room_bytes: float) -> int:
    """Return the largest number of samples that fits, up to `MOST_SAMPLES`; 0 if one does not fit.

    `bytes_of` grows almost linearly: interpolation comes first, and bisection if it converges
    slowly.
    """
    low, high = 1, MOST_SAMPLES
    least, most = bytes_of(low), bytes_of(high)
    if least > room_bytes:
        return 0
    if most <= room_bytes:
        return high
    halve = False
    while high - low > 1:
        share = 0.5 if halve else (room_bytes - least) / (most - least)
        middle = min(high - 1, max(low + 1, int(low + share * (high - low))))
        needed, width = bytes_of(middle), high - low
        if needed <= room_bytes:
            low, least = middle, needed
        else:
            high, most = middle, needed
        halve = 2 * (high - low) > width
    return low
