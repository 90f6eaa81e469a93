"""Evidence: what ranks did in their first steps, and the differences that rounding alone makes.

Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmark.base.evidence.checks import LARGEST, Check

Array = NDArray[np.floating[Any]]

Quantity = tuple[str | int, ...]
"""Keys to a value of a capture: ("tensors", "gradient", "conv1.weight"), ("losses", rank, step)."""

PARTS = ("gradient", "parameters after the first update", "parameters", "optimizer state")
"""Names of the groups of tensors, in the order in which a step computes them."""

BY_SHARE = (
    *("initial_sha256", "sample_ids", "weights", "losses", "draws", "skipped", "buffers"),
    "data_set",
)

MARGIN = 8.0
"""Tolerance divided by the largest deviation among the perturbed runs of the reference."""

BLIND = 0.25
"""Largest tolerance, relative to the gradient's norm, that still detects a factor of two."""
TINY = 1e-45


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Results of a few steps of a strategy, or of the reference.

    Fields named in `BY_SHARE` have one entry for each distinct share of the batch, in order.
    """

    initial_sha256: tuple[str, ...] = ()
    sample_ids: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Ids of the samples, by share and step."""
    weights: tuple[tuple[float, ...], ...] = ()
    """Weight of the samples, by share and step."""
    losses: tuple[tuple[float, ...], ...] = ()
    """Loss by share and step."""
    draws: tuple[tuple[tuple[str, ...], ...], ...] = ()
    """Random draws that the workload has recorded, by share and step."""
    skipped: tuple[tuple[int, ...], ...] = ()
    """Steps without an update because a loss-scaled gradient was not finite, by share."""
    buffers: tuple[Mapping[str, Array], ...] = ()
    learning_rates: tuple[float, ...] = ()
    quality: Mapping[str, float | None] = field(default_factory=dict)
    samples_evaluated: int = 0
    tensors: Mapping[str, Mapping[str, Array]]
    """Tensors by group (see `PARTS`) and name; names of the optimizer state are `parameter/key`."""
    data_set: tuple[str, ...] = ()
    """Numbers of samples of the data sets, by share."""
    weight_source: str = ""
    """Description of how ranks determine weights that their batches do not know."""

    def save(self, path: Path) -> None:
        """Write the capture of one share to an `.npz` file: tensors as arrays, the rest as JSON."""
        (buffers,) = self.buffers
        parts = {**self.tensors, "buffers": buffers}
        arrays: dict[str, Any] = {
            f"{part}\t{name}": a for part, named in parts.items() for name, a in named.items()
        }
        facts = json.dumps(asdict(replace(self, tensors={}, buffers=())))
        with path.open("wb") as file:
            np.savez(file, allow_pickle=False, facts=np.array(facts), **arrays)

    @classmethod
    def load(cls, path: Path) -> Capture:
        with np.load(path) as stored:
            facts: dict[str, Any] = json.loads(str(stored["facts"]))
            named: dict[str, dict[str, Array]] = {}
            for key in stored.files:
                part, tab, name = key.partition("\t")
                if tab:
                    named.setdefault(part, {})[name] = stored[key]
        facts = {key: _as_tuples(value) for key, value in facts.items()}
        return cls(**facts | {"buffers": (named.pop("buffers", {}),), "tensors": named})

    @classmethod
    def of_shares(cls, shares: Sequence[Capture]) -> Capture:
        """Join the captures of all shares.  The first one has the unsharded tensors."""
        joined: dict[str, Any] = {
            name: tuple(chain.from_iterable(getattr(share, name) for share in shares))
            for name in BY_SHARE
        }
        return replace(shares[0], **joined)

    def seen_by_one_process(self) -> Capture:
        """Convert to the report of one process that drives all devices (DataParallel)."""
        steps = range(len(self.learning_rates))
        ids = tuple(tuple(i for rank in self.sample_ids for i in rank[step]) for step in steps)
        weights = tuple(sum(rank[step] for rank in self.weights) for step in steps)
        draws = tuple(tuple(sorted(d for rank in self.draws for d in rank[step])) for step in steps)
        losses = tuple(float(np.mean([rank[step] for rank in self.losses])) for step in steps)
        return replace(
            self,
            initial_sha256=self.initial_sha256[:1],
            data_set=self.data_set[:1],
            sample_ids=(ids,),
            weights=(weights,),
            losses=(losses,),
            draws=(draws,),
            skipped=self.skipped[:1],
            buffers=self.buffers[:1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """The expected capture, and the deviations that rounding alone causes."""

    reference: Capture
    unperturbed: Capture
    """The run as defined.  For a hypothesis `reference` is another run, with the same spreads."""
    perturbed: Sequence[Capture]
    floor: float
    """Relative deviation that one rounding of a result causes."""
    exact_forward: bool = False
    """Require bitwise equal first losses: the model amplifies rounding in its forward pass."""
    least: float = 0.0
    """Difference that always counts as equal."""
    _spreads: dict[Quantity, float] = field(default_factory=dict, init=False, repr=False)
    """Cache of `allowed`: norms of all tensors of a large model take seconds."""

    @property
    def hide_errors(self) -> bool:
        """True if a gradient that is wrong by a factor of two could pass."""
        gradient = self.reference.tensors["gradient"]
        allowed = sum(self.allowed("tensors", "gradient", name) ** 2 for name in gradient)
        return allowed > BLIND**2 * sum(norm(tensor) ** 2 for tensor in gradient.values())

    @property
    def rounding_skips(self) -> bool:
        """True if rounding alone decides which steps overflow."""
        return any(run.skipped != self.unperturbed.skipped for run in self.perturbed)

    def allowed(self, *quantity: str | int) -> float:
        """Largest difference, of tensors in the 2-norm, that counts as equal."""
        kind, name = quantity[0], quantity[-1]
        if self.exact_forward and kind == "losses" and name == 0:
            return 0.0
        size = finite_norm(value_of(self.reference, quantity))
        return MARGIN * self.spread(quantity) + self.floor * size + self.least

    def spread(self, quantity: Quantity) -> float:
        """Largest deviation of the perturbed runs, in the 2-norm."""
        if quantity not in self._spreads:
            runs = (run for run in self.perturbed if run.skipped == self.unperturbed.skipped)
            spreads = (difference(run, self.unperturbed, quantity) for run in runs)
            self._spreads[quantity] = max(spreads, default=0.0)
        return self._spreads[quantity]


def norm(values: Array | float | None) -> float:
    """The 2-norm; 0 for a missing value."""
    return 0.0 if values is None else float(np.linalg.norm(np.asarray(values, np.float64)))


def finite_norm(values: Array | float | None) -> float:
    """The 2-norm of the finite elements: infinite ones, as in a mask, would allow any deviation."""
    size = norm(values)
    return size if np.isfinite(size) else norm(np.nan_to_num(np.array(values), posinf=0, neginf=0))


def deviation(actual: Any, wanted: Any) -> float:
    """The 2-norm of the difference; equal infinite elements differ by zero.

    A missing value, and one of another shape, counts as zero.
    """
    if actual is None or wanted is None or np.shape(actual) != np.shape(wanted):
        return norm(wanted)
    with np.errstate(invalid="ignore"):  # infinite elements
        gap = np.subtract(actual, wanted, dtype=np.float64)
    if np.isfinite(size := norm(gap)):
        return size
    return norm(np.where(np.isclose(actual, wanted, 0, 0, equal_nan=True), 0, gap))


def value_of(capture: Capture, quantity: Quantity) -> Any:
    """The tensor or number; None if the capture lacks it."""
    value: Any = getattr(capture, str(quantity[0]))
    for key in quantity[1:]:
        value = (value or {}).get(key) if isinstance(value, Mapping | None) else value[key]
    return value


def difference(capture: Capture, expected: Capture, quantity: Quantity) -> float:
    """Norm of the difference between two captures' values."""
    return deviation(value_of(capture, quantity), value_of(expected, quantity))


def equal(name: str, actual: str, expected: str, location: str | None = None) -> Check:
    """A check that holds if both values are equal."""
    return Check(
        name=name,
        holds=actual == expected,
        found=actual,
        expected=expected,
        tolerance=None,
        where=location,
    )


def worst_of(
    name: str, quantities: Mapping[str, Quantity], capture: Capture, tolerances: Tolerances
) -> Check:
    """A check on the quantity with the largest deviation in tolerances."""
    worst, deviation, allowed, units = "nothing to compare", 0.0, 0.0, 0.0
    for location, quantity in quantities.items():
        change = difference(capture, tolerances.reference, quantity)
        tolerance = tolerances.allowed(*quantity)
        ratio = 0.0 if change == 0 else change / max(tolerance, TINY)
        ratio = ratio if np.isfinite(ratio) else LARGEST
        if ratio >= units:
            worst, deviation, allowed, units = location, change, tolerance, ratio
    return Check(
        name=name,
        holds=units <= 1,
        found=deviation if np.isfinite(deviation) else LARGEST,
        expected=0.0,
        tolerance=allowed if np.isfinite(allowed) else LARGEST,
        where=worst,
        in_tolerances=units,
    )


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
