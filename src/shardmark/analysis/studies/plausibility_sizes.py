"""How many bytes a model's own state takes, and on how many ranks a strategy divides it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.studies.against import Against, given
from shardmark.analysis.studies.facts import facts

FULL_PRECISION_BYTES = 4
HALF_PRECISION_BYTES = 2
OPTIMIZERS: Mapping[str, int] = {"SGD": 0, "SGD with momentum": 1, "Adam": 2}
"""Numbers that the optimizer keeps for each parameter."""
WHOLE = frozenset({"single", "dp", "ddp", "zero-0"})
"""Strategies of which every rank holds all of the state."""
_ALL = frozenset({"parameters", "gradients", "optimizer"})
SHARDED: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(WHOLE, frozenset()),
    "zero-1": frozenset({"optimizer"}),
    "zero-2": frozenset({"gradients", "optimizer"}),
    **dict.fromkeys(("zero-3", "fsdp", "fsdp-grad-op", "fsdp-hybrid"), _ALL),
}
"""Strategy -> what it divides over the ranks (Rajbhandari et al., SC 2020, section 5)."""
SMALLEST_GROUP = 2
"""Fewest ranks that share one copy under hybrid sharding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """Parameters, gradients and optimizer state of one copy of a model, in full precision."""

    optimizer: str
    parameter_bytes: float
    source: str
    """Whose the parameters are, in words."""

    @property
    def kinds(self) -> Mapping[str, float]:
        """Kind -> bytes; a gradient is as large as its parameter."""
        one = self.parameter_bytes
        slots = OPTIMIZERS[self.optimizer]
        return {"parameters": one, "gradients": one, "optimizer": slots * one}

    def held_bytes(self, strategy: str, ranks: int, *, group: int | None = None) -> float:
        """By one rank, evenly divided; the strategy must be one of `SHARDED`.

        Hybrid sharding divides over `group` ranks; by default over half of all, the most there
        can be.
        """
        shares = (group or max(1, ranks // 2)) if strategy == "fsdp-hybrid" else ranks
        sharded = SHARDED[strategy]
        return sum(size / shares if kind in sharded else size for kind, size in self.kinds.items())


def states_of(against: Against, conditions: Mapping[str, Any]) -> tuple[ModelState, ...]:
    """One for each optimizer that the study may have used; none for a model of unknown size.

    The parameters are those that the run recorded of the same model on the same data set, where
    it did, else counted ones.
    """
    model, dataset = conditions.get("workload.model"), conditions.get("workload.dataset")
    measured = next(_recorded(against.rows, model, dataset), None)
    if measured is not None:
        size, source = measured
    else:
        known = facts()
        count = known.parameters(model, dataset)
        if count is None:
            return ()
        size = float(FULL_PRECISION_BYTES * count)
        source = f"{count:,} parameters of {model}, {known.counted}"
    return tuple(
        ModelState(optimizer=name, parameter_bytes=size, source=source)
        for name in optimizers_of(conditions)
    )


def optimizers_of(conditions: Mapping[str, Any]) -> tuple[str, ...]:
    """The stated one; all where the study does not say."""
    name = conditions.get("recipe.optimizer.name")
    momentum = conditions.get("recipe.optimizer.momentum")
    if name is None:
        return tuple(OPTIMIZERS)
    if name == "sgd":
        momenta = {None: ("SGD", "SGD with momentum"), 0: ("SGD",)}
        return momenta.get(momentum, ("SGD with momentum",))
    return ("Adam",)


def _recorded(rows: Iterable[Row], model: object, dataset: object) -> Iterator[tuple[float, str]]:
    """Bytes and source of every row whose ranks hold the whole model in full precision."""
    for row in rows:
        if not row.ok_trials or row.strategy not in WHOLE or row.precision != "fp32":
            continue
        trial = row.trials[0].trial
        size = row.metrics.get("parameter_bytes")
        same = (given(trial, "workload.model"), given(trial, "workload.dataset"))
        if size is not None and same == (model, dataset) and model is not None:
            yield size.value, f"parameter_bytes of {row.place} in this run"
