"""Records of all ranks and of their replays, as the quantities that are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from statistics import median_low

import numpy as np
import torch
from torch import Tensor

from shardmark.base.evidence.captures import (
    BLIND,
    MARGIN,
    TINY,
    Array,
    Capture,
    Tolerances,
    equal,
    worst_of,
)
from shardmark.base.evidence.checks import Check
from shardmark.scripts.record import Record, joined_tensors

FLOAT32_EPSILON = float(np.finfo(np.float32).eps)

ROUNDINGS = 4.0
"""Roundings of a result that a gradient passes, in the precision of the forward pass."""

NEGLIGIBLE = 0.02
"""Part of the full gradient's allowance that every tensor has: small sums cancel to rounding."""

UPDATE = 1e-3
"""Relative difference of updates that counts as equal where the gradients are equal: optimizers
divide by the gradient's size, so that rounding in small gradients grows."""

LATER = 0.01
"""Relative difference that counts as equal in later steps, where training amplifies rounding."""

EQUAL = 1e-6
"""Relative difference of weights that count as equal on two ranks."""

SAME_ROWS = 1e-5
"""Difference of two rows that count as equal, relative to the size of all rows: one process may
normalise them by sums that it rounds otherwise."""

REDUCTION = 1e-3
"""Relative difference between a reduced gradient and the mean of the ranks' own ones that counts as
rounding; wrong reductions differ by more."""

EXPLAINED = 0.02
"""Part of a deviation that a cause may leave unexplained."""

Vectors = dict[str, Array]
"""Flat tensors by parameter, in fp64."""


@dataclass(frozen=True, kw_only=True)
class Records:
    """Records of the ranks, and of the replays of their data in one process."""

    ranks: Sequence[Record]
    replay: Record | None = None
    """None if the script does not run in one process."""
    disturbed: Record | None = None
    """A replay with the ranks' shares in another order, which differs by rounding alone."""
    accepted_rounding: float = 0.0
    """Relative rounding of the reduction that the user accepts."""
    local_steps: bool = False
    """True if the user accepts steps with each rank's own gradient: their mean is compared."""
    before_clipping: bool = False
    """True if the first gradients are those before the script clips them."""
    after_updates: bool = False
    """True if the first step follows steps of other optimizers, which rounding has changed."""
    with_shares: Callable[[], Record | None] = lambda: None
    """Starts a replay whose batch norm takes the statistics of each rank's rows."""
    alone: Callable[..., Record | None] = lambda *_, **__: None
    """Starts a replay of the samples of these ranks alone, and `without` some terms of the loss."""

    @property
    def one_process(self) -> Record:
        """The replay of records that have one."""
        assert self.replay is not None
        return self.replay

    @cached_property
    def expected(self) -> Vectors:
        """Gradients of the replay's first step."""
        return self.replayed(self.one_process)

    @cached_property
    def deviation(self) -> float:
        """Relative difference between the ranks' gradient and the replay's."""
        return relative(*aligned(self.gradients(), self.expected))

    @property
    def count(self) -> int:
        return len(self.ranks)

    @cached_property
    def steps(self) -> int:
        """Number of steps that all processes took."""
        records = [*self.ranks, *([self.replay] if self.replay is not None else [])]
        return min(len(record.steps) for record in records)

    @property
    def epsilon(self) -> float:
        records = [*self.ranks, *([self.replay] if self.replay is not None else [])]
        return max(FLOAT32_EPSILON, *(record.epsilon for record in records))

    @property
    def floor(self) -> float:
        """Relative difference of a gradient that the rounding of its parts causes."""
        rounding = max(self.epsilon, self.accepted_rounding, self.after_updates * LATER / 8)
        if rounding > FLOAT32_EPSILON:
            return 2 * rounding  # sums are rounded to 16 bits once on each rank
        rows = self._difference_of_rows if self.matched else 0.0
        return ROUNDINGS * max(self.epsilon, rows)

    @property
    def reduction_tolerance(self) -> float:
        return max(REDUCTION, 4 * self.floor)

    @property
    def matched(self) -> bool:
        """True if the replay computed the rows of all ranks in its first step."""
        return self._difference_of_rows <= SAME_ROWS

    @cached_property
    def _difference_of_rows(self) -> float:
        return inf if self.replay is None else difference_of_rows(self.ranks, self.replay)

    @cached_property
    def divides_rows(self) -> bool:
        """True if ranks compute parts of their rows, such as parts of sequences.

        Most modules of the replay, which has full rows, then get K times as many elements for
        each row that the model gets, where K ranks share a row.
        """
        if self.replay is None:  # the same rows and other results: parts, or random numbers
            return any(
                f.inputs and tensors_differ(a, b, SAME_ROWS)
                for rank in self.ranks[1:]
                for f, of_rank in zip(self.ranks[0].forwards, rank.forwards, strict=False)
                for a, b in zip(f.outputs, of_rank.outputs, strict=False)
            )

        def elements_of_a_row(name: str, records: Sequence[Record]) -> float:
            rows = sum(f.rows for record in records for f in record.forwards if f.step == 0)
            return sum(r.calls[name][2] for r in records if name in r.calls) / max(rows, 1)

        times = [
            round(elements_of_a_row(name, [self.one_process]) / of_ranks, 6)
            for name in self.one_process.calls
            if (of_ranks := elements_of_a_row(name, self.ranks))
        ]
        sharing = median_low(times or [1.0])
        return sharing > 1 and sharing.is_integer() and self.count % sharing == 0

    @property
    def unlike_module(self) -> str:
        """A module with other results than on the ranks for the same inputs; empty without one."""
        for name, single in self.one_process.calls.items():
            of_ranks = [rank.calls.get(name, [0.0, 0.0, 0.0]) for rank in self.ranks]
            if not all(map(all, (*of_ranks, single))):
                continue  # too large to be summed up, or never called
            off = np.abs(np.sum(of_ranks, axis=0) - single) / np.maximum(single, TINY)
            same_inputs = off[2] == 0 and off[0] < REDUCTION / 10
            of_batch_norm = any(name == place[0] for place in self.ranks[0].batch_norm)
            if same_inputs and off[1] > REDUCTION and not of_batch_norm:
                return name or "(the whole model)"
        return ""

    def gradients(self, step: int = 0) -> Vectors:
        """Gradients that the ranks' optimizers use."""
        if self.before_clipping and step == 0:
            return self.clipped()
        return self._joined([rank.steps[step].gradients for rank in self.ranks])

    @property
    def unsliced(self) -> list[int]:
        """Numbers of the parameters that are recorded in full on each rank."""
        first = self.ranks[0]
        return [number for number in range(len(first.names)) if number not in first.flat_slices]

    def gradients_by_rank(self) -> list[Vectors]:
        return [self._named(rank.steps[0].gradients) for rank in self.ranks]

    @cached_property
    def different_gradients(self) -> list[str]:
        """Names of the gradients that differ among the ranks."""
        first, *others = self.gradients_by_rank()
        return [
            name
            for name in (self.ranks[0].names[number] for number in self.unsliced)
            if any(
                (name in g) != (name in first)
                or (name in g and relative(g[name], first[name]) > 1e-5)
                for g in others
            )
        ]

    @cached_property
    def reduces_in_step(self) -> bool:
        """True if the ranks' weights are equal after steps with different gradients."""
        first, *others = self.ranks
        numbers = [first.names.index(name) for name in self.different_gradients]
        return bool(numbers) and all(
            not torch.equal(first.before[n], first.steps[-1].after[n])
            and all(
                relative(_flat(rank.steps[k].after[n]), _flat(step.after[n])) <= EQUAL
                for k, step in enumerate(first.steps[: self.steps])
                for rank in others
            )
            for n in numbers
        )

    def after_reduction(self) -> Records:
        """The same records with the gradients that an optimizer has reduced in its step."""

        def read_later(record: Record) -> Record:
            steps = [
                replace(step, gradients=step.reduced or step.gradients) for step in record.steps
            ]
            return replace(record, steps=steps)

        later = self._changed(read_later)
        return self if later.different_gradients else later

    def from_step(self, number: int) -> Records:
        """The same records without the steps before this one, as if it were the first."""

        def cut(record: Record) -> Record:
            before, steps = record.steps[number - 1].after, record.steps[number:]
            of_steps = [f for f in record.forwards if f.step >= number]
            forwards = [replace(forward, step=forward.step - number) for forward in of_steps]
            return replace(record, before=before, steps=steps, forwards=forwards)

        later = self._changed(cut)  # replays of other data begin with the first step
        return replace(later, after_updates=True, with_shares=lambda: None, alone=lambda *_: None)

    def _changed(self, change: Callable[[Record], Record]) -> Records:
        replay, other = (r if r is None else change(r) for r in (self.replay, self.disturbed))
        return replace(self, ranks=list(map(change, self.ranks)), replay=replay, disturbed=other)

    def weights_at_start(self) -> Vectors:
        return self._joined([rank.before for rank in self.ranks])

    def replayed(self, record: Record | None, step: int = 0) -> Vectors:
        """Gradients of a replay; empty without one."""
        if self.before_clipping and step == 0:
            return self.clipped_of(record)
        return {} if record is None else self._named(record.steps[step].gradients)

    def clipped(self) -> Vectors:
        """Gradients before the first calls that clip them; empty without one."""
        by_rank = [rank.steps[0].unclipped for rank in self.ranks]
        return self._joined(by_rank) if all(by_rank) else {}

    def clipped_of(self, record: Record | None) -> Vectors:
        """Gradients of a replay before the first calls that clip them; empty without one."""
        return {} if record is None else self._named(record.steps[0].unclipped)

    def off_before_clipping(self, record: Record) -> float:
        """Deviation of the ranks' mean gradient before the first clip from that of a replay."""
        by_rank = [rank.steps[0].unclipped for rank in self.ranks]
        before = self.reduced(by_rank) if all(by_rank) else {}
        return relative(*aligned(before, self.clipped_of(record)))

    def loss(self, record: Record) -> float | None:
        """Mean of the numbers that `backward` was called on in the first step."""
        losses = [micro.loss for micro in record.steps[0].micros if micro.loss is not None]
        return sum(losses) / len(losses) if losses else None

    def samples_check(self, holds: bool) -> Check:
        """Describe the samples that the ranks' models got."""
        forwards = [f for rank in self.ranks for f in rank.forwards if f.step >= 0]
        rows = [value for f in forwards for value in f.samples]
        text = f"{len(rows)} rows, {len(set(rows))} different" if rows else "not seen"
        return Check(name="samples", holds=holds, found=text, expected=text, tolerance=None)

    def local_gradients(self) -> list[list[Vectors]]:
        """Gradients of each rank's own rows, by rank and micro-batch; empty where unknown."""
        names = self.ranks[0].names
        return [
            [
                {names[n]: _flat(gradient) for n, gradient in micro.gradients.items()}
                for micro in rank.steps[0].micros
            ]
            for rank in self.ranks
        ]

    def updates(self, record: Record | None = None, *, steps: int = 1) -> Vectors:
        """Change of the parameters in the first steps."""
        if record is not None:
            before, after = self._named(record.before), self._named(record.steps[steps - 1].after)
        else:
            before = self.weights_at_start()
            after = self._joined([rank.steps[steps - 1].after for rank in self.ranks])
        return {name: after[name] - before[name] for name in after}

    def _joined(self, by_rank: Sequence[Sequence[Tensor | None]]) -> Vectors:
        if self.local_steps:
            ranks = list(map(self._named, by_rank))
            return {
                name: np.mean([rank[name] for rank in ranks], axis=0)
                for name in ranks[0]
                if all(name in rank for rank in ranks)
            }
        return self._named(joined_tensors(self.ranks, by_rank))

    def reduced(self, by_rank: Sequence[Sequence[Tensor | None]]) -> Vectors:
        """Mean of the ranks' tensors, or their slices behind each other (FSDP1)."""
        vectors = [self._named(tensors) for tensors in by_rank]
        means = {
            name: sum((v[name] for v in vectors if name in v), np.zeros(1)) / self.count
            for name in (self.ranks[0].names[number] for number in self.unsliced)
            if name in vectors[0]
        }
        return self._joined(by_rank) | means

    def _named(self, tensors: Sequence[Tensor | None]) -> Vectors:
        names = self.ranks[0].names
        return {
            name: _flat(tensor)
            for name, tensor in zip(names, tensors, strict=False)
            if tensor is not None
        }


def _flat(tensor: Tensor) -> Array:
    return tensor.double().flatten().numpy()


def joined_flat(tensors: Sequence[Tensor]) -> Array:
    """The elements of tensors behind each other."""
    return np.concatenate(list(map(_flat, tensors)))


def stacked(vectors: Vectors, names: Sequence[str] | None = None) -> Array:
    """The tensors behind each other."""
    chosen = [vectors[name] for name in (vectors if names is None else names)]
    return np.concatenate(chosen) if chosen else np.zeros(0)


def aligned(first: Vectors, second: Vectors) -> tuple[Array, Array]:
    """The tensors that both have, by name; flat parameters without their padding."""
    pairs = [_trimmed(first[name], second[name]) for name in sorted(first) if name in second]
    if not pairs:
        return np.zeros(0), np.zeros(0)
    return np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs])


def _trimmed(first: Array, second: Array) -> tuple[Array, Array]:
    count = min(len(first), len(second))
    return first[:count], second[:count]


def relative(value: Array, expected: Array) -> float:
    """Norm of the difference in units of the larger norm; infinite if it is not finite."""
    with np.errstate(invalid="ignore"):
        difference = np.linalg.norm(np.where(value == expected, 0.0, value - expected))
        size = max(np.linalg.norm(value), np.linalg.norm(expected))
        ratio = float(difference / size) if difference else 0.0
    return ratio if np.isfinite(ratio) else float("inf")


def factor_of(values: Array, expected: Array, tolerance: float = inf) -> float | None:
    """Factor that brings `expected` closest to the values; None if that leaves too much."""
    size = float(expected @ expected)
    factor = float(values @ expected) / size if size else 0.0
    return factor if factor and relative(values, factor * expected) <= tolerance else None


def reproduces(gradients: Vectors, candidate: Vectors, expected: Vectors, floor: float) -> bool:
    """True if a candidate for a cause gives the gradients, in every tensor, and not `expected`.

    It may leave `EXPLAINED` of the deviation of a tensor, and the rounding of the full gradient.
    """
    names = expected.keys() & gradients.keys()
    if not names or not names <= candidate.keys():
        return False
    trios = [(gradients[name], candidate[name], expected[name]) for name in sorted(names)]
    shortest = [min(map(len, trio)) for trio in trios]
    trios = [(a[:n], b[:n], c[:n]) for n, (a, b, c) in zip(shortest, trios, strict=True)]
    left = [float(np.linalg.norm(used - shown)) for used, shown, _ in trios]
    deviations = [float(np.linalg.norm(used - single)) for used, _, single in trios]
    deviation = float(np.linalg.norm(deviations))
    rounding = min(4 * floor * float(np.linalg.norm(stacked(expected))), deviation / 10)
    return bool(
        np.linalg.norm(left) <= max(EXPLAINED * deviation, rounding)
        and all(a <= max(EXPLAINED * b, rounding) for a, b in zip(left, deviations, strict=True))
    )


def scaled(factor: float, gradients: Vectors) -> Vectors:
    return {name: factor * gradient for name, gradient in gradients.items()}


def common_factor(gradients: Vectors, expected: Vectors, floor: float) -> float | None:
    """Factor by which every tensor is larger than expected; None if there is no such factor."""
    factor = factor_of(*aligned(gradients, expected)) or 0.0
    shown = factor > 0 and reproduces(gradients, scaled(factor, expected), expected, floor)
    return factor if shown else None


def tensors_differ(first: Tensor, second: Tensor, tolerance: float) -> bool:
    """True if two tensors differ by more than a relative tolerance; infinities may be equal."""
    if first.shape != second.shape:
        return True
    a, b = _flat(first), _flat(second)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    a, b = a[~same], b[~same]
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return True
    size = max(np.linalg.norm(v[np.isfinite(v)]) for v in map(_flat, (first, second)))
    return bool(np.linalg.norm(a - b) > tolerance * size)


def gradient_check(
    name: str, gradients: Vectors, expected: Vectors, disturbed: Vectors, floor: float
) -> Check:
    """Compare gradients tensor by tensor, with tolerances from a run that only rounding changes.

    `found` is the relative difference of all tensors together, `where` the worst tensor, or the
    factor that all share.
    """
    zeros = {key: np.zeros_like(value) for key, value in (expected | gradients).items()}
    size = float(np.linalg.norm(stacked(expected)))
    factor = common_factor(gradients, expected, floor)
    full = [
        {key: _trimmed(vectors.get(key, zero), zero)[0] for key, zero in zeros.items()}
        for vectors in (gradients, expected, disturbed or expected)
    ]
    captures = [Capture(tensors={"gradient": vectors}) for vectors in full]
    if not disturbed or not relative(*aligned(disturbed, expected)):
        floor *= MARGIN  # no run shows how much rounding changes
    tolerances = Tolerances(
        reference=captures[1],
        unperturbed=captures[1],
        perturbed=captures[2:],
        floor=floor,
        # No tensor is blamed for less than the rounding of the full gradient in fp32.
        least=max(NEGLIGIBLE * floor, FLOAT32_EPSILON) * size,
    )
    quantities: dict[str, tuple[str | int, ...]] = {
        key: ("tensors", "gradient", key) for key in zeros
    }
    check = worst_of(name, quantities, captures[0], tolerances)
    deviation = relative(*(stacked(vectors, sorted(zeros)) for vectors in full[:2]))
    in_all = f"{factor:.4g} times as large in every parameter" if factor else check.where
    in_all = check.where if check.holds else in_all
    return check.model_copy(update={"found": deviation, "where": in_all})


def first_gradient_checks(records: Records, replay: Record) -> list[Check]:
    """Check the gradient that is used, and before that the one that torch's functions clip."""
    processes, used = (replay, records.disturbed), records.gradients()
    pairs = {
        "gradient before clipping": (records.clipped(), *map(records.clipped_of, processes)),
        "gradient, step 1": (used, *map(records.replayed, processes)),
    }
    if not all(pairs["gradient before clipping"][:2]):
        del pairs["gradient before clipping"]
    return [gradient_check(name, a, b, c, records.floor) for name, (a, b, c) in pairs.items()]


def later_checks(records: Records, replay: Record) -> Iterator[Check]:
    """Check the gradients of the later steps, in which rounding may grow.

    A search along a line (LBFGS) takes other points after a difference of rounding.  The checks end
    where two replays differ so much that a gradient which holds shows nothing.
    """
    if any(step.evaluations > 1 for step in replay.steps):
        return
    for step in range(1, records.steps):
        expected = records.replayed(replay, step)
        disturbed = records.replayed(records.disturbed, step)
        spread = relative(*aligned(disturbed, expected))
        allowed = max(LATER, MARGIN * spread)
        difference = relative(*aligned(records.gradients(step), expected))
        if difference <= allowed and allowed > BLIND:
            return
        yield Check(
            name=f"gradient, step {step + 1}",
            holds=difference <= allowed,
            found=difference,
            expected=0.0,
            tolerance=allowed,
            in_tolerances=difference / allowed,
        )


def update_check(records: Records, replay: Record, *, steps: int = 1) -> Check:
    """Compare the first updates, without elements whose gradient is rounding alone."""
    ranks, single = records.updates(steps=steps), records.updates(replay, steps=steps)
    disturbed = records.updates(records.disturbed, steps=steps) if records.disturbed else single
    gradients = records.replayed(replay)
    noisy = records.replayed(records.disturbed) if records.disturbed else gradients
    worst, location = 0.0, "nothing to compare"
    size = float(np.linalg.norm(stacked(single)))
    for name in single:
        if name not in ranks or name not in gradients:
            continue
        update, expected = _trimmed(ranks[name], single[name])
        gradient = gradients[name][: len(expected)]
        noise = noisy[name][: len(expected)] - gradient if name in noisy else gradient * 0
        least = max(0.01 * np.sqrt(np.mean(gradient**2)), 4 * np.sqrt(np.mean(noise**2)))
        counts = np.abs(gradient) > least
        difference = float(np.linalg.norm((update - expected)[counts])) / max(size, TINY)
        if difference >= worst:
            worst, location = difference, name
    spread = MARGIN * relative(*aligned(disturbed, single))
    allowed = max(UPDATE if steps == 1 else LATER, 4 * records.floor, min(spread, BLIND))
    return Check(
        name="first update" if steps == 1 else f"updates of {steps} steps", holds=worst <= allowed,
        found=worst, expected=0.0, tolerance=allowed, where=location,
        in_tolerances=worst / allowed,
    )  # fmt: skip


def agreement_check(name: str, by_rank: Sequence[Sequence[Tensor]], names: Sequence[str]) -> Check:
    """Check that the ranks have equal tensors."""
    first = by_rank[0]
    for rank, tensors in enumerate(by_rank[1:], 1):
        for number, (tensor, expected) in enumerate(zip(tensors, first, strict=False)):
            if tensor.shape != expected.shape:
                shapes = f"shape {tuple(tensor.shape)}", f"shape {tuple(expected.shape)}"
                return equal(name, *shapes, f"{names[number]}, rank {rank}")
            difference = relative(_flat(tensor), _flat(expected))
            if difference > EQUAL:
                text = f"differ by {difference:.2g}"
                return equal(name, text, "equal on all ranks", f"{names[number]}, rank {rank}")
    return equal(name, "equal on all ranks", "equal on all ranks")


def difference_of_rows(ranks: Sequence[Record], replay: Record) -> float:
    """Least difference between the rows that models get on all ranks and in the replay.

    It is that of one tensor of the inputs, relative to the size of its rows.
    """
    least = inf
    both = [rows_of(records, 0) + rows_of(records, 0, "from_end") for records in (ranks, [replay])]
    for of_ranks, of_replay in zip(*both, strict=False):
        if len(of_ranks) and len(of_ranks) == len(of_replay):
            size = max(float(np.sqrt(np.mean(of_ranks**2))), TINY)
            least = min(least, float(np.max(np.abs(of_ranks - of_replay))) / size)
    return least


def rows_of(ranks: Sequence[Record], step: int, kind: str = "inputs") -> list[Array]:
    """Sorted checksums of the rows of all ranks in a step, for each tensor of a kind."""
    forwards = [f for rank in ranks for f in rank.forwards if f.step == step]
    tensors = [[t.numpy() for t in getattr(f, kind)] for f in forwards]
    return [np.sort(np.concatenate(same)) for same in zip(*tensors, strict=False)]
