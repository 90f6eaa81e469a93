"""Changes of one thing in the interpreters of a script's ranks, by name.  Imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from shardmark.base.errors import InputError

if TYPE_CHECKING:
    from shardmark.scripts.interventions.base import Intervention, Place

SIGN = "%"
"""Sign before the names of interventions in the arguments of a variant."""


def _in(module: str, names: str) -> dict[str, str]:
    """Return the classes of a module by the names of their interventions."""
    return {name: f"{module}:{name.title().replace('_', '')}" for name in names.split()}


COSTS = {
    **_in("look", "look"),
    **_in("same_batch", "same_batch rows_of"),
    **_in("no_peers", "no_peers"),
    **_in("swap_places", "swap_places"),
    **_in("between_steps", "no_update no_evaluation no_checkpoint no_logging"),
}
"""Interventions that show what something costs.  They may change what is trained."""
CALLS = {
    **_in("arguments", "workers prefetch pin_memory fused foreach set_to_none bucket_view"),
    **_in("arguments", "bucket_mb keep_unsharded"),
}
"""Savings that add arguments to calls of the script."""
SAVINGS = {
    **CALLS,
    **_in("settings", "no_sync compile channels_last tf32 cudnn_benchmark threads malloc"),
}
"""Interventions that may save time; what they train is compared."""
_ALL = COSTS | SAVINGS


def text_of(interventions: Mapping[str, str]) -> str:
    """Return the arguments of a variant with these interventions, by name with their values."""
    words = [f"{name}={value}" if value else name for name, value in interventions.items()]
    return SIGN + ",".join(words) if words else ""


def named_in(text: str) -> dict[str, str]:
    """Return the interventions of such a text.  Raises `InputError` for an unknown name."""
    pairs = (word.partition("=") for word in text.removeprefix(SIGN).split(",") if word)
    interventions = {name: value for name, _, value in pairs}
    for name in interventions:
        if name not in _ALL:
            raise InputError(f"intervention {name!r}", "unknown", f"known are {', '.join(_ALL)}")
    return interventions


def built(interventions: Mapping[str, str], place: Place | None = None) -> list[Intervention]:
    """Return the interventions of a rank, which knows its place unless it is audited."""
    made = []
    for name, value in interventions.items():
        module, _, kind = _ALL[name].partition(":")
        made.append(getattr(importlib.import_module(f"{__name__}.{module}"), kind)(place, value))
    return made


def facts_of(interventions: Iterable[Intervention]) -> dict[str, object]:
    """Return what the interventions have seen, by the name of their class."""
    return {type(made).__name__: facts for made in interventions if (facts := made.facts())}
