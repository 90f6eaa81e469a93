"""What the experiment asks of the tables of strategies and workloads, imported when asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, TypeAdapter

from shardmark.config.engines import ENGINE_OPTIONS
from shardmark.config.problems import choices, mistake, refuse, show
from shardmark.core.errors import InputError

if TYPE_CHECKING:
    from shardmark.strategies.base import Strategy


def strategy_names() -> tuple[str, ...]:
    from shardmark.strategies import STRATEGIES

    return tuple(STRATEGIES)


def strategy_options(name: str) -> tuple[str, ...]:
    """The strategy's own options; none for a name that is not in the table."""
    from shardmark.strategies import STRATEGIES, option_names

    return option_names(name) if name in STRATEGIES else ()


def strategy_schema(name: str) -> dict[str, Any]:
    """JSON schema of the data class behind the name, fields that are no options included."""
    from shardmark.strategies import strategy_class

    return TypeAdapter(strategy_class(name)).json_schema()


def shared_options() -> tuple[str, ...]:
    """Keys of a strategy entry that override the recipe instead of being the strategy's own."""
    from shardmark.strategies import SHARED_OPTIONS

    return SHARED_OPTIONS


def build_strategy(name: str, options: Mapping[str, Any]) -> Strategy:
    """Raises `InputError` for an unknown name, an unknown option or a bad value."""
    from shardmark.strategies import build_strategy as build

    return build(name, options)


def workload_models() -> Mapping[str, type[BaseModel]]:
    from shardmark.workloads import WORKLOADS

    return WORKLOADS


def engine_models() -> Mapping[str, type[BaseModel]]:
    return ENGINE_OPTIONS


def resolve_engine(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Name and all options, as JSON has them; raises pydantic's `ValidationError`."""
    models = engine_models()
    name = engine.get("name")
    if not isinstance(name, str) or name not in models:
        found = f"found {show(name)}" if "name" in engine else "missing"
        refuse([mistake(("name",), found, choices(str(name or ""), tuple(models)), engine)])
    given = {key: value for key, value in engine.items() if key != "name"}
    return {"name": name, **models[name].model_validate(given).model_dump(mode="json")}


def resolve_workload(workload: Mapping[str, Any]) -> dict[str, Any]:
    """All options with their defaults, as JSON has them; raises pydantic's `ValidationError`."""
    from shardmark.workloads import options

    names = tuple(workload_models())
    if "name" not in workload:
        refuse([mistake(("name",), "missing", choices("", names), workload)])
    name = workload["name"]
    if not isinstance(name, str) or name not in names:
        refuse([mistake(("name",), f"found {show(name)}", choices(name, names), name)])
    try:
        resolved = options(dict(workload))
    except InputError as error:
        where, found, allowed = error.args
        refuse([mistake((), f"{where}: {found}", allowed, workload)])
    return {"name": name, **resolved.model_dump(mode="json")}
