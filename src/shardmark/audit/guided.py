"""Guided start: ranks of a script with the weights, batches and draws of another script's ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree  # torch has no public one
from torch import Tensor, is_tensor, nn

from shardmark.audit.replay import ReplayObserver
from shardmark.scripts.batches import joined
from shardmark.scripts.full_tensors import is_a, plain_name, set_parameters
from shardmark.scripts.observer import Observer
from shardmark.scripts.recording import Plan


class GuidedObserver(ReplayObserver):
    """Records a rank that trains on its share of another script's first steps.

    The script keeps its own learning rates, schedules and lengths of loaders.
    """

    before_step = Observer.before_step
    length_of = Observer.length_of

    def __init__(self, plan: Plan) -> None:
        assert plan.recorded is not None
        rank, ranks = (int(os.environ.get(n, d)) for n, d in (("RANK", "0"), ("WORLD_SIZE", "1")))
        recorded = len(list(Path(plan.recorded).glob("rank-*.pt")))
        many = max(1, recorded // ranks)
        self._share = rank % max(1, ranks // recorded), max(1, ranks // recorded)
        first = rank * many if ranks <= recorded else rank // self._share[1]
        super().__init__(replace(plan, order=tuple(range(first, first + many))))
        self._divides_itself = False
        """True if the script makes micro-batches of a loader's batch."""
        self._drawn_for: dict[int, tuple[str, Tensor]] = {}
        """Place of a divided draw, and checksums of the rows that it is for, by forward pass."""
        self._outside_by_shape: dict[torch.Size, list[Tensor]] = {}
        for draw in self._ranks[0].draws:
            self._outside_by_shape.setdefault(draw.value.shape, []).append(draw.value)

    def _set_weights(self, module: nn.Module) -> None:
        self.record.unmatched.clear()  # draws until now made weights and data, which are A's
        named = {plain_name(name): p for name, p in module.named_parameters()}
        values = dict(zip(self._first.names, self._first_weights, strict=True))
        pairs = [(named[n], values[other]) for n, other in self.plan.pairs.items() if n in named]
        parameters, weights = [p for p, _ in pairs], [weight for _, weight in pairs]
        set_parameters(parameters, weights, deepspeed=is_a(module, "DeepSpeedEngine"))

    def _substitutes(
        self, recorded: Iterator[Any], iterate: Callable[[], Iterator[Any]]
    ) -> Iterator[Any]:
        regrouped: Iterator[Any] | None = None
        for scripts_batch in iterate():
            regrouped = regrouped or self._regrouped(recorded, _rows(scripts_batch))
            batch = next(regrouped, None)
            fitting = None if batch is None else fitted(scripts_batch, batch)
            self.record.fed += fitting is not None
            yield scripts_batch if fitting is None else fitting

    def _regrouped(self, batches: Iterator[Any], rows: int) -> Iterator[Any]:
        """This rank's batches; a script may divide its loader's batches itself."""
        (index, count), first = self._share, list(islice(batches, 1))
        self._divides_itself = bool(first) and 0 < count * rows == _rows(first[0])
        merged, pieces = self.plan.merged, self.plan.divided
        merged, pieces = (1, 1) if self._divides_itself else (merged, pieces)
        batches = chain(first, batches)
        while parts := list(islice(batches, merged)):
            batch = parts[0] if len(parts) == 1 else joined(parts)
            for piece in divided(batch, pieces):
                yield divided(piece, count)[index]

    def _inside(self, forward: int, number: int, place: str, value: Tensor) -> Tensor | None:
        """Draws of A's forward passes for the rows that this forward pass has."""
        if self.plan.interleaved:
            return super()._inside(forward, number, place, value)
        (index, count), merged = self._share, self.plan.merged
        calls = max(1, sum((f.step, f.micro) == (0, 0) for f in self._first.forwards))
        part, piece = divmod(forward // calls, self.plan.divided)
        passes = [(part * merged + n) * calls + forward % calls for n in range(merged)]
        drawn = [rank.forward_draws.get(n, [])[number:][:1] for n in passes for rank in self._ranks]
        if not all(drawn):
            self.record.unmatched.append(place)
            return None
        parts = [draw for (draw,) in drawn]
        rows, pieces = sum(len(p) for p in parts if p.dim()), self.plan.divided * count
        if pieces > 1 and value.dim() and rows == pieces * len(value):
            number = index * self.plan.divided + piece
            number = number if self._divides_itself else piece * count + index
            all_rows = [row for p in parts if len(p) for row in p.chunk(len(p))]
            parts = all_rows[number * len(value) : (number + 1) * len(value)]
            forwards = [f for n in passes for rank in self._ranks for f in rank.forwards[n : n + 1]]
            if inputs := [f.inputs[0] for f in forwards if f.inputs]:
                sums = torch.cat(inputs)
                size = len(sums) // pieces
                self._drawn_for[forward] = place, sums[number * size : (number + 1) * size]
        return self._together(parts, len(parts), place, value, False)

    def after_root(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        super().after_root(module, inputs, outputs)
        forward = len(self.record.forwards) - 1
        if (drawn := self._drawn_for.pop(forward, None)) is not None:
            rows = next(iter(self.record.forwards[forward].inputs), torch.empty(0))
            same = rows.shape == drawn[1].shape and torch.allclose(rows, drawn[1])
            self.record.unmatched += [] if same else [drawn[0]]

    def _outside(self, place: str, value: Tensor) -> Tensor | None:
        """Draws in the order of the recorded ones of that shape: places are of another script."""
        drawn = self._outside_by_shape.get(value.shape, [])
        number = next(self._drawn[str(value.shape)])
        if len(self._ranks) > 1 or number >= len(drawn) or self._share[1] > 1:
            return super()._outside(place, value)
        return drawn[number]


def divided(batch: Any, count: int) -> list[Any]:
    """Parts of a batch by rows; the batch itself again where rows are not seen."""
    leaves, spec = pytree.tree_flatten(batch)
    if count == 1 or any(is_tensor(leaf) and leaf.dim() and len(leaf) % count for leaf in leaves):
        return [batch] * count
    chunks = [
        leaf.chunk(count) if is_tensor(leaf) and leaf.dim() else [leaf] * count for leaf in leaves
    ]
    return [pytree.tree_unflatten(list(part), spec) for part in zip(*chunks, strict=True)]


def _rows(batch: Any) -> int:
    return next((len(leaf) for leaf in _flat(batch)[0] if is_tensor(leaf) and leaf.dim()), 0)


def fitted(batch: Any, other: Any) -> Any | None:
    """The other batch in the structure of a batch; None if its tensors are of other kinds."""
    leaves_of_batch, spec = _flat(batch)
    of_other, _ = _flat(other)
    tensors = [leaf for leaf in of_other if is_tensor(leaf)]
    numbers = [n for n, leaf in enumerate(leaves_of_batch) if is_tensor(leaf)]
    kinds = [
        [(t.is_floating_point(), t.dim()) for t in of_batch]
        for of_batch in (tensors, [leaves_of_batch[n] for n in numbers])
    ]
    if kinds[0] != kinds[1]:
        return other if type(batch) is type(other) and not numbers else None
    for number, tensor in zip(numbers, tensors, strict=True):
        leaves_of_batch[number] = tensor.to(leaves_of_batch[number].dtype)
    return pytree.tree_unflatten(leaves_of_batch, spec)


def _flat(batch: Any) -> tuple[list[Any], Any]:
    if hasattr(batch, "data") and isinstance(batch.data, dict):  # transformers' BatchEncoding
        return pytree.tree_flatten(dict(batch))
    return pytree.tree_flatten(batch)
