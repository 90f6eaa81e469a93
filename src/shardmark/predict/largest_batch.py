"""The largest batch within some memory: predicted, and mended by what real steps needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardmark.costs import cost_model
from shardmark.costs.base import Cell
from shardmark.trials.trial import Trial

MOST_SAMPLES = 2**20
"""No larger batch of a rank is looked for."""
MOST_TRIES = 4
BEYOND = 1.05
"""Of the room, that a step which ran out of memory is taken to need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One batch by real steps."""

    samples: int
    """Of a rank's pass."""
    peak_bytes: float | None
    """None where it ran out of memory."""
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """What one cell of the matrix takes."""

    cell: Trial
    room_bytes: float
    """For a rank's tensors."""
    most: int = MOST_SAMPLES
    """That the training set has for a rank's pass."""
    predicted: int | None = None
    """Samples of a rank's pass, before the first try."""
    tries: tuple[Try, ...] = ()
    reason: str | None = None
    """Why nothing more is known."""

    @property
    def best(self) -> Try | None:
        """The largest that fitted."""
        fitting = [each for each in self.tries if each.fits]
        return max(fitting, key=lambda each: each.samples, default=None)

    @property
    def per_rank_batch(self) -> int | None:
        """Of the recipe, with all its passes."""
        return None if self.best is None else self.best.samples * passes_of(self.cell)

    @property
    def samples_of_step(self) -> int | None:
        """Of all ranks: some share their samples."""
        each = self.per_rank_batch
        return None if each is None else each * self.cell.layout.shares

    @property
    def predicted_batch(self) -> int | None:
        """The same as predicted."""
        return None if self.predicted is None else self.predicted * passes_of(self.cell)


def passes_of(cell: Trial) -> int:
    """A rank's batch is a multiple of it: passes of accumulation, or a pipeline's micro-batches."""
    costs = cost_model(cell.built_strategy)
    ranks = Cell(recipe=cell.recipe, world_size=cell.world_size, nodes=cell.nodes)
    return cell.recipe.gradient_accumulation * costs.num_microbatches(ranks)


def next_samples(
    predicted_bytes: Callable[[int], float], room_bytes: float, tries: Sequence[Try], most: int
) -> int | None:
    """What to try now; None where a larger batch is not expected to fit.

    The prediction is moved to meet the last try; from two on, the line through the last two counts.
    """
    fitting = max((each.samples for each in tries if each.fits), default=0)
    failing = min((each.samples for each in tries if not each.fits), default=most + 1)
    if failing - fitting <= 1 or len(tries) == MOST_TRIES:
        return None
    points = [
        (each.samples, BEYOND * room_bytes if each.peak_bytes is None else each.peak_bytes)
        for each in tries
    ]
    guess = min(most, largest(_through(points, predicted_bytes), room_bytes))
    if fitting and guess <= fitting:
        return None
    return min(max(guess, fitting + 1), failing - 1)


def _through(
    points: Sequence[tuple[int, float]], predicted_bytes: Callable[[int], float]
) -> Callable[[int], float]:
    """Bytes by samples: as predicted, moved to the last point, or the line through the last two."""
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
    """The largest number of samples that fits, up to `MOST_SAMPLES`; 0 for none.

    `bytes_of` grows, nearly on a line: where that ends is tried first, and halves where it misled.
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
