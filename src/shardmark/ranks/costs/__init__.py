"""The cost models of strategies, which their classes name.  Importing it imports no torch."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from shardmark.base.errors import InputError
from shardmark.ranks.costs.base import Costs
from shardmark.ranks.strategies.base import Strategy
from shardmark.ranks.strategies.script import ScriptVariant


def costs_of(strategy: Strategy) -> Costs[Any] | None:
    """Return the cost model that the strategy's class names; None if it names none.

    A subclass does not inherit it: it may send something else than its parent.
    """
    place = vars(type(strategy)).get("costs")
    if place is None:
        return None
    try:
        costs: Costs[Any] = resolve_name(place)(strategy)
    except (AttributeError, ImportError, ValueError) as error:
        problem = f"its cost model {place!r} cannot be loaded ({error})"
        remedy = "write costs = 'module:Class' in its class"
        raise InputError(f"strategy {strategy.name}", problem, remedy) from error
    return costs


def cost_model(strategy: Strategy) -> Costs[Any]:
    """Return the cost model of a strategy.  Raises `InputError` if it has none."""
    costs = costs_of(strategy)
    if isinstance(strategy, ScriptVariant):
        raise InputError(
            f"variant {strategy.name}",
            "a script distributes its training itself, and nothing predicts it",
            "measure it with run or time, or write a task (`shardmark init`)",
        )
    if costs is None:
        raise InputError(
            f"strategy {strategy.name}",
            f"there is no cost model for {strategy.name}",
            "measure it with run, or name a cost model in the class: costs = 'module:Class'",
        )
    return costs
