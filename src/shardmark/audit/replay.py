"""Replay of the ranks' first steps: the same script in one process with the ranks' data."""

from __future__ import annotations

import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from math import gcd, inf, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import rnn

from shardmark.scripts.batches import checksum, joined, mean_checksum, padding_of
from shardmark.scripts.draws import OF_MODEL
from shardmark.scripts.full_tensors import is_a, set_parameters
from shardmark.scripts.interventions.base import replace
from shardmark.scripts.observer import Observer, trained_parameters
from shardmark.scripts.record import BATCHES, START, Draw, Loader, Record, joined_tensors
from shardmark.scripts.recording import GROWN, Plan, rank_file

MOST_WAYS = 4096
"""Most choices of one call of batch norm for each rank."""
MOST_VIEWS = 16
"""Most views of a batch that a script may put behind each other before batch norm."""


def padded_draws(parts: Sequence[Tensor], value: Tensor) -> Tensor | None:
    """The ranks' draws for batches that are padded to the longest of all ranks, as `joined` does.

    The padding gets the numbers of `value`, which no sample depends on.
    """
    together = value.clone()
    first = 0
    for part in parts:
        rows = together[first : first + len(part)]
        if any(a > b for a, b in zip(part.shape, rows.shape, strict=True)):
            return None
        rows[tuple(slice(size) for size in part.shape)] = part
        first += len(part)
    return together


def _by_place(draws: Sequence[Draw]) -> dict[str, list[Tensor]]:
    values: dict[str, list[Tensor]] = {}
    for draw in draws:
        values.setdefault(draw.place, []).append(draw.value)
    return values


class ReplayObserver(Observer):
    """Gives the script the ranks' batches, random numbers and initial weights, and records."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        assert plan.recorded is not None
        count = len(list(Path(plan.recorded).glob("rank-*.pt")))
        ranks = [Record.load(rank_file(plan.recorded, rank)) for rank in range(count)]
        self._first = ranks[0]
        self.skipped_by_ranks = ranks[0].skipped
        files = [rank_file(plan.recorded, rank).with_suffix(START) for rank in range(count)]
        starts = [torch.load(path, mmap=True) for path in files if path.is_file()]
        self._first_weights = [t for t in joined_tensors(ranks, starts) if t is not None]
        if plan.perturbed:
            rounding = max(ranks[0].epsilon, torch.finfo(torch.float32).eps)
            signs = [torch.arange(t.numel()).cos().sign().view_as(t) for t in self._first_weights]
            pairs = zip(self._first_weights, signs, strict=True)  # each element up or down
            self._first_weights = [tensor * (1 + rounding * sign) for tensor, sign in pairs]
        self._ranks = [ranks[rank] for rank in plan.order]
        self._divisor = plan.divisor or len(self._ranks)
        self._iterations = 0
        self._drawn: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._draws_outside = 0
        self._draws_inside: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
        self._started = False
        self._replaced: list[tuple[Tensor, Tensor]] = []
        """Draws of forward passes since the last step, and the ranks' draws in their place."""
        self._own_rates: list[tuple[dict[str, Any], float]] = []
        self._last_recomputed = -1
        self._draws_by_place = [_by_place(rank.draws) for rank in self._ranks]
        self._draws_of_first = _by_place(self._first.draws)
        self._draw_places = set[str]().union(*self._draws_by_place)
        shared = set.intersection(*map(set, self._draws_by_place))
        self._shared_places = {place for place in shared if not place.startswith(OF_MODEL)}
        self._ranks_by_rows: dict[int, Tensor] = {}
        """Ranks of the rows that batch norm got last, by their number: a backward pass may repeat
        the call."""
        if plan.batch_norm == "shares":
            replace(functional, "batch_norm", self._batch_norm_of_shares)
        replace(  # each rank may sort its sequences by length; those of all ranks are not sorted
            *(rnn, "pack_padded_sequence"),
            lambda pack, *args, **options: pack(*args[:3], **options | {"enforce_sorted": False}),
        )

    @cached_property
    def _recorded_batches(self) -> list[list[list[Any]]]:
        """Batches by rank and iteration.  Read late: the script defines classes of its batches."""
        assert self.plan.recorded is not None
        device = "cuda" if torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]
        paths = [rank_file(self.plan.recorded, r).with_suffix(BATCHES) for r in self.plan.order]
        return [torch.load(path, map_location=device, weights_only=False) for path in paths]

    def _choose_sampling(self, module: nn.Module) -> None:  # noqa: ARG002
        self.record.every = self._first.every

    def before_root(self, module: nn.Module) -> None:
        super().before_root(module)
        if self._started:
            return
        self._started = True
        with self._recording():
            self._set_weights(module)

    def _set_weights(self, module: nn.Module) -> None:
        """Give the script's parameters the ranks' initial weights."""
        engine = module if is_a(module, "DeepSpeedEngine") else None
        created = [optimizer for ref in self.optimizers if (optimizer := ref()) is not None]
        numbers = [n for n in self._first.optimizers if n < len(created)]
        candidates = [[created[n] for n in numbers], *([optimizer] for optimizer in created)]
        for optimizers in [[engine]] if engine is not None else candidates:
            parameters = [p for optimizer in optimizers for p in trained_parameters(optimizer)]
            if len(parameters) == len(self._first_weights):
                initial = [] if self.plan.perturbed or engine else self._first.initial
                if None not in initial and initial == [checksum(p) for p in parameters]:
                    return  # they are what the ranks began with, and may change until the step
                set_parameters(parameters, self._first_weights, deepspeed=engine is not None)
                return

    def batches(
        self, loader: Any, number: int, iterate: Callable[[], Iterator[Any]]
    ) -> Iterator[Any]:
        iteration, self._iterations = self._iterations, self._iterations + 1
        recorded = self._joined_batches(loader, iteration)
        if recorded is None:
            yield from iterate()
            return
        described = Loader(batch_size=getattr(loader, "batch_size", None), number=number)
        self.record.loaders.append(described)
        for batch in self._substitutes(recorded, iterate):
            self._micro.loaders.append(number)
            described.batches += 1
            yield batch

    def _substitutes(
        self, recorded: Iterator[Any], _: Callable[[], Iterator[Any]]
    ) -> Iterator[Any]:
        return recorded

    def _joined_batches(self, loader: Any, iteration: int) -> Iterator[Any] | None:
        """The ranks' batches of an iteration over a loader; None if they have none."""
        recorded = [rank[iteration] for rank in self._recorded_batches if iteration < len(rank)]
        if len(recorded) < len(self._ranks):
            return None
        size = self._ranks[0].loaders[iteration].batch_size
        size = size or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        padding = padding_of([batch for rank in recorded for batch in rank])
        self.record.padded_left |= any(left for left, _ in padding.values())
        join = partial(joined, size=size, sections=self.plan.sections, padding=padding)
        steps = zip(*recorded, strict=False)
        return (
            batch
            for parts in steps
            for batch in (parts if self.plan.interleaved else [join(parts)])
        )

    def length_of(self, _number: int, length: int) -> int:
        """Number of batches of a rank, as a schedule may follow from it."""
        of_rank = [loader.length for loader in self._first.loaders if loader.number == _number]
        recorded = of_rank[0] if of_rank and of_rank[0] is not None else length
        return recorded * (len(self._ranks) if self.plan.interleaved else 1)

    def draw(self, place: str, value: Tensor, own_seed: bool) -> Tensor | None:  # noqa: ARG002
        if self._busy:
            return None
        if self.in_backward:
            return self._recomputed(value)
        if place not in self._draw_places:  # a rank that `mp.spawn` starts has other last callers
            inner_of = {p: p.rpartition(" < ")[0] or p for p in self._draw_places}
            fewer = [p for p in inner_of if place.startswith(f"{p} < ")]
            similar = [p for p, inner in inner_of.items() if place.startswith(f"{inner} < ")]
            one = similar if len(similar) == 1 else []  # several may be of other lines
            place = max(fewer or one, key=len, default=place)
        if self.in_forward_pass:
            forward = len(self.record.forwards)
            number = next(self._draws_inside[forward])
            replaced = self._inside(forward, number, place, value)
        else:
            replaced = self._outside(place, value)
        if self._stack and replaced is not None:
            self._replaced.append((value.clone(), replaced))
        return replaced

    def _recomputed(self, value: Tensor) -> Tensor | None:
        """The replacement of a draw that activation checkpointing repeats in the backward pass."""
        count = len(self._replaced)
        following = range(self._last_recomputed + 1, min(self._last_recomputed + 2, count))
        for number in (*following, *reversed(range(count))):
            original: Tensor
            replacement: Tensor
            original, replacement = self._replaced[number]
            if torch.equal(original, value):
                self._last_recomputed = number
                return replacement
        return None

    def before_backward(self, tensors: Any, gradients: Any = None) -> None:
        super().before_backward(tensors, gradients)
        divided = {*self.plan.divided_terms}
        ways = [(bool(divided & {e[0].key, str(n)}), e[2]) for n, e in enumerate(self._ends)]
        paths = [path for is_divided, path in ways if is_divided]
        others = {edge for is_divided, path in ways if not is_divided for edge in path}
        if paths and not others and self._micro.loss is not None:
            self._micro.loss /= self._divisor
        if self.plan.divisor:
            self._micro.losses.clear()  # they are of all terms
        # Each is divided where its way leaves that of the others.
        parts = ([edge for edge in path if edge not in others] for path in paths)
        for node, number in {edges[0] for edges in parts if edges}:
            node.register_hook(partial(self._divide, number))

    def _divide(self, number: int, results: Sequence[Tensor], _: Any) -> tuple[Tensor, ...]:
        of_terms = (results[number] / self._divisor,)
        return (*results[:number], *of_terms, *results[number + 1 :])

    def before_step(self, optimizer: Any) -> None:
        """Record the script's own learning rates, and let the optimizer use those of rank 0."""
        super().before_step(optimizer)
        number, step = self._number_of(optimizer), len(self.record.steps)
        if number is None or step >= len(self._first.steps) or self._own_rates:
            return
        inner = optimizer.optimizer if is_a(type(optimizer), "DeepSpeedEngine") else optimizer
        first = sum(len(self._settings[n]) for n in sorted(self._settings) if n < number)
        recorded = self._first.steps[step].settings[first : first + len(inner.param_groups)]
        for group, settings in zip(inner.param_groups, recorded, strict=False):
            rate = group.get("lr")
            if isinstance(rate, float | int) and "lr" in settings:
                self._own_rates.append((group, rate))
                group["lr"] = settings["lr"]

    def after_step(self, optimizer: Any) -> None:
        super().after_step(optimizer)
        for group, rate in self._own_rates:
            group["lr"] = rate
        self._own_rates = []
        self._replaced, self._last_recomputed = [], -1

    def _inside(self, forward: int, number: int, place: str, value: Tensor) -> Tensor | None:
        count = len(self._ranks)
        ranks = [self._ranks[forward % count]] if self.plan.interleaved else self._ranks
        forward = forward // count if self.plan.interleaved else forward
        parts = [rank.forward_draws.get(forward, [])[number : number + 1] for rank in ranks]
        self.record.unmatched += [] if all(parts) else [place]
        return self._together([part[0] for part in parts if part], len(ranks), place, value, False)

    def _outside(self, place: str, value: Tensor) -> Tensor | None:
        if place.startswith(OF_MODEL):  # initial weights: all ranks get those of rank 0
            weights = self._draws_of_first.get(place, [])[next(self._drawn[place]) :][:1]
            return weights[0] if weights and weights[0].shape == value.shape else None
        if not self.plan.interleaved:
            number = next(self._drawn[place])
            parts = [draws.get(place, []) for draws in self._draws_by_place]
            at_number = [values[number] for values in parts if number < len(values)]
            self.record.unmatched += [] if len(at_number) == len(parts) else [place]
            return self._together(at_number, len(self._ranks), place, value, self.plan.grows)
        if place not in self._shared_places:
            return None
        number, self._draws_outside = self._draws_outside, self._draws_outside + 1
        rank = self._ranks[number % len(self._ranks)]
        shared = [draw.value for draw in rank.draws if draw.place in self._shared_places]
        return self._together(shared[number // len(self._ranks) :][:1], 1, place, value, False)

    def _together(
        self, parts: list[Tensor], count: int, place: str, value: Tensor, may_grow: bool
    ) -> Tensor | None:
        """Put the ranks' draws together in the shape that the script asks for.

        A script that draws the samples of a batch does not know that one process takes those of all
        ranks: outside of the model the result then has the rows of all ranks.
        """
        if len(parts) < count:
            return None
        if all(part.shape == value.shape and torch.equal(part, parts[0]) for part in parts):
            return parts[0]
        if len({part.dim() for part in parts}) == 1 and value.dim() == parts[0].dim():
            for dimension in range(value.dim()):
                others = {(*p.shape[:dimension], *p.shape[dimension + 1 :]) for p in parts}
                if len(others) > 1:
                    continue
                together = torch.cat(parts, dimension)
                if together.shape == value.shape:
                    return together
            alone = count == 1 and not self.plan.guided  # a rank's samples, which may be fewer
            grows = may_grow and value.dim() and parts[0].shape[1:] == value.shape[1:]
            if grows and (alone or parts[0].shape == value.shape):
                if count > 1:
                    self.record.grown = True
                    (Path(self.plan.directory) / GROWN).touch()
                return torch.cat(parts)
            of_all = value.dim() > 1 and sum(map(len, parts)) == len(value)
            if of_all and not self.record.padded_left:
                padded = padded_draws(parts, value)
                if padded is not None:
                    return padded
        self.record.unmatched.append(place)
        return None

    def _batch_norm_of_shares(
        self, original: Callable[..., Tensor], value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Batch norm that takes its statistics from each rank's rows, as on the ranks."""
        call = inspect.signature(original).bind(value, *args, **kwargs)
        ranks = self._ranks_of_rows(value) if call.arguments.get("training") else None
        if ranks is None:
            return original(value, *args, **kwargs)
        of_ranks = [value[ranks == number] for number in range(len(self._ranks))]
        shares = [original(rows, *args, **kwargs) for rows in of_ranks]
        return torch.cat(shares)[ranks.argsort(stable=True).argsort()]

    def _ranks_of_rows(self, value: Tensor) -> Tensor | None:
        """Place of the rank of each row in their order; None if the ranks have other rows.

        A script may put the views of a batch behind each other.  The rows of each view are then
        those of rank 0, of rank 1, and so on: the means that the ranks took show it.
        """
        rows = len(value)
        if self.in_backward or not self._stack:
            ranks = self._ranks_by_rows.get(rows) if self.in_backward else None
            return None if ranks is None else ranks.to(value.device)
        place, least = self.place_of(self._stack[-1]), inf
        calls = [rank.batch_norm.get(place, []) for rank in self._ranks]
        ways = prod(len({size for size, _ in of_rank}) for of_rank in calls)
        if ways > MOST_WAYS:
            return None
        # One rank may have calls of its own: rows and means show which calls belong together.
        for sizes in itertools.product(*({size for size, _ in of_rank} for of_rank in calls)):
            fits = sum(sizes) == rows
            for views in (n for n in range(1, fits * MOST_VIEWS + 1) if not gcd(*sizes) % n):
                of_view = [n for n, size in enumerate(sizes) for _ in range(size // views)]
                way = torch.tensor(of_view * views, device=value.device)
                means = [mean_checksum(value[way == number]) for number in range(len(sizes))]
                together = zip(means, sizes, calls, strict=True)
                off = sum(min(abs(m - a) for n, a in c if n == size) for m, size, c in together)
                if off < least:
                    least, self._ranks_by_rows[rows] = off, way
        return self._ranks_by_rows[rows] if least < inf else None
