"""What no cell of a matrix may have: a batch that ranks cannot share, a rank that is not there."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from shardmark.config.experiment import Experiment
from shardmark.config.problems import join
from shardmark.core.errors import InputError
from shardmark.trials.cells import Cell


def check_batches(experiment: Experiment, cells: Iterable[Cell]) -> None:
    """Every training rank must get the same number of samples, in equal micro-batches."""
    users: dict[tuple[str, int], dict[int, Cell]] = defaultdict(dict)
    for cell in cells:
        micro_batches = cell.recipe.gradient_accumulation
        if cell.recipe.global_batch is not None:
            users["global_batch", cell.recipe.global_batch].setdefault(
                cell.batch_parts * micro_batches, cell
            )
        elif cell.recipe.per_rank_batch is not None:
            users["per_rank_batch", cell.recipe.per_rank_batch].setdefault(micro_batches, cell)
    errors = [
        _batch_error(f"{experiment.name}: recipe.{key}", batch, cell, math.lcm(*by_parts))
        for (key, batch), by_parts in users.items()
        for parts, cell in by_parts.items()
        if batch % parts
    ]
    if errors:
        raise join(errors)


def _batch_error(where: str, batch: int, cell: Cell, multiple: int) -> InputError:
    ranks, micro_batches = cell.batch_parts, cell.recipe.gradient_accumulation
    shares = f"{ranks} training ranks" if cell.recipe.global_batch is not None else ""
    if micro_batches > 1:
        shares += f"{' x ' if shares else ''}{micro_batches} micro-batches"
    below = batch // multiple * multiple
    nearest = f"{below} and {below + multiple}" if below else str(multiple)
    found = f"{batch} samples cannot be shared equally by {shares} ({cell.title})"
    return InputError(where, found, f"nearest batches that every cell can share: {nearest}")


def check_slow_ranks(experiment: Experiment, cells: Sequence[Cell]) -> None:
    """A rank that no cell has was meant to be another."""
    most = max(cell.world_size for cell in cells)
    for rank in sorted({rank for cell in cells for rank in cell.slow_ranks}):
        if rank >= most:
            raise InputError(
                f"{experiment.name}: slow_ranks",
                f"there is no rank {rank}: the largest world size is {most}",
                f"ranks 0 to {most - 1}",
            )
