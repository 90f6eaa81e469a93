"""The dotted keys of an experiment: what there is, and what a short one stands for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from shardmark.config import tables
from shardmark.config.experiment import Experiment, Placement
from shardmark.config.problems import Location
from shardmark.core.recipe import Limits, Measure, Recipe

NOT_VARIED = ("measure.repeats", "measure.link_seconds")
"""Keys of varied sections that are no axis: repeats are what every cell has."""

VARIED_SECTIONS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("recipe", Recipe),
    ("placement", Placement),
    ("measure", Measure),
)
"""Sections whose keys may be axes, also under their last part alone where that is clear."""

_VARIED = tuple(f"{section}." for section, _ in VARIED_SECTIONS)


def model_keys(model: type[BaseModel], prefix: str) -> tuple[str, ...]:
    """Dotted keys of a model's fields, a nested model's own key before those inside it."""
    return tuple(_walk(model, prefix))


def _walk(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}.{name}"
        nested = _nested_model(field.annotation)
        if nested is not None:
            yield from _walk(nested, f"{prefix}.{name}")


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


@cache
def fixed_keys() -> tuple[str, ...]:
    """Every key of the file that no table adds to, sections included."""
    sections: tuple[tuple[str, type[BaseModel]], ...] = (*VARIED_SECTIONS, ("limits", Limits))
    inside = [key for prefix, model in sections for key in model_keys(model, prefix)]
    return (*Experiment.model_fields, *inside)


def workload_keys(workload: object) -> tuple[str, ...]:
    """`workload.name` and the options of the workload of that name, if there is one."""
    name = workload.get("name") if isinstance(workload, Mapping) else None
    model = tables.workload_models().get(name) if isinstance(name, str) else None
    options = model_keys(model, "workload") if model else ()
    return tuple(dict.fromkeys(("workload.name", *options)))


def engine_keys(engine: object) -> tuple[str, ...]:
    """`engine.name` and the options of the engine of that name, if there is one."""
    name = engine.get("name") if isinstance(engine, Mapping) else None
    model = tables.engine_models().get(name) if isinstance(name, str) else None
    return ("engine.name", *(model_keys(model, "engine") if model else ()))


def axis_keys(workload: object, strategies: Sequence[str]) -> tuple[str, ...]:
    """Every full key that may be an axis of a matrix with these strategies."""
    varied = [key for key in fixed_keys() if key.startswith(_VARIED)]
    options = {
        f"strategy.{option}" for name in strategies for option in tables.strategy_options(name)
    }
    return (
        "strategy",
        "world_size",
        "slow_ranks",
        *(key for key in varied if key not in NOT_VARIED),
        *workload_keys(workload),
        *sorted(options),
    )


def full_key(key: str) -> str:
    """`recipe.precision` for `precision`, if only one key ends so; else the key itself."""
    candidates = meanings(key)
    return candidates[0] if len(candidates) == 1 else key


def meanings(key: str) -> tuple[str, ...]:
    """The keys of recipe, placement and measurement that a short one may stand for."""
    if "." in key or key in ("strategy", "world_size"):
        return (key,)
    return tuple(
        full for full in fixed_keys() if full.startswith(_VARIED) and full.endswith(f".{key}")
    )


def names_at(location: Location, workload: object) -> tuple[str, ...]:
    """The keys allowed in the mapping at that place of the file."""
    prefix = ".".join(str(part) for part in location)
    if not prefix:
        return tuple(Experiment.model_fields)
    engines = {key for name in tables.engine_models() for key in engine_keys({"name": name})}
    known = (*fixed_keys(), *workload_keys(workload), *sorted(engines))
    inside = [key.removeprefix(f"{prefix}.") for key in known if key.startswith(f"{prefix}.")]
    return tuple(key for key in inside if "." not in key)


def assigned(data: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy with the value at that path; mappings on the way are made, anything else replaced."""
    first, *rest = path
    if not rest:
        return {**data, first: value}
    inner = data.get(first)
    return {**data, first: assigned(inner if isinstance(inner, Mapping) else {}, rest, value)}
