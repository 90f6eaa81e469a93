"""Axes of the matrix: keys that can vary, the types of their values, and their short keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from functools import cache
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    create_model,
)
from pydantic_core import CoreSchema, InitErrorDetails, core_schema

from shardmark.base.cells import NODES
from shardmark.base.recipe import (
    MAX_RANKS,
    OF_SCRIPTS,
    Measure,
    Model,
    Placement,
    Recipe,
    SlowRanks,
)
from shardmark.base.system.plugins import plugin_names
from shardmark.experiment.messages import Location, mistake, refuse, show
from shardmark.experiment.tasks import TASKS
from shardmark.ranks.strategies import (
    PLUGINS,
    SHARED_OPTIONS,
    STRATEGIES,
    option_names,
    strategy_class,
)
from shardmark.ranks.workloads.options import WorkloadOptions
from shardmark.ranks.workloads.script.options import ScriptOptions

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

SECTIONS: dict[str, type[Model]] = {"recipe": Recipe, "placement": Placement, "measure": Measure}
"""Sections whose keys can be axes, in addition to the workload's."""
SHORTENED = (*SECTIONS, "workload")
"""Sections whose keys can be shortened to their last part if that is unambiguous."""
NOT_VARIED = (
    *("measure.repeats", "measure.seeds", "measure.max_remeasure", "measure.link_seconds"),
)
MAX_CELLS = 4_000
"""Maximum number of cells of a matrix; the largest preset has 132."""
MATRIX_ONLY_AXES = ("strategy", "world_size")
"""Keys that exist only as axes."""
VARIANT = "variant"
"""Axis of a script: a mapping from names to arguments, which stands in for `strategy`."""
SIZE_AXES = ("world_size", NODES, "placement.ranks_per_node")


@dataclass(frozen=True)
class BareName:
    """Annotation of a mapping that can be given by its name alone."""

    names: tuple[str, ...]

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(named, handler(kind))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"oneOf": [{"enum": list(self.names)}, *handler(schema)["oneOf"]]}


def named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


@cache
def entry_model(name: str) -> type[Model]:
    """Return the model of a strategy's entry in the axis `strategy`.

    It has the strategy's options, and keys of the recipe that the entry overrides.
    """
    strategy = strategy_class(name)
    hints = get_type_hints(strategy, include_extras=True)
    fields: dict[str, Any] = {"name": (Literal[name], ...)}
    for option in option_names(name):
        default = strategy.__dataclass_fields__[option].default
        fields[option] = (hints[option], ... if default is MISSING else default)
    for key in SHARED_OPTIONS:
        fields[key] = (_value(Recipe.model_fields[key]), None)
    return create_model(name, __base__=_Entry, __doc__=strategy.__doc__, **fields)


class _Entry(Model):
    model_config = ConfigDict(use_attribute_docstrings=False)


class Variant(_Entry):
    """An entry of the axis `strategy` for a script."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._=,+-]{0,59}$")
    arguments: str


def variants(value: Any) -> Any:
    """Return the axis `variant` as entries of the axis `strategy`."""
    if not isinstance(value, Mapping):
        return value
    return [{"name": str(name), "arguments": text} for name, text in value.items()]


@cache
def matrix_model(
    strategies: tuple[str, ...] = tuple(STRATEGIES),
    workloads: tuple[type[BaseModel], ...] = tuple(TASKS.values()),
) -> type[BaseModel]:
    """Return the model of the matrix: a list of values for each full key.

    Without strategies, the axis `strategy` has variants of a script.
    """
    entries: Any = Variant
    if strategies:
        entries = Annotated[
            Union[tuple(map(entry_model, strategies))],  # noqa: UP007  (made at run time)
            Field(discriminator="name"),
            BareName(strategies),
        ]
    world_size = Annotated[int, Field(strict=True, ge=1, le=MAX_RANKS)]
    axes: dict[str, Any] = {"strategy": entries, "world_size": world_size, "slow_ranks": SlowRanks}
    for section, model in SECTIONS.items():
        for key, field in fields_of(model, section):
            if not key.startswith(NOT_VARIED):
                axes[key] = _value(field)
    for workload in workloads:
        for key, field in fields_of(workload, "workload"):
            axes[key] = _either(axes.get(key), _value(field))
    for name in strategies:
        for option in option_names(name):
            field = entry_model(name).model_fields[option]
            axes[f"strategy.{option}"] = _either(axes.get(f"strategy.{option}"), _value(field))
    fields: dict[str, Any] = {
        f"axis_{number}": (
            GenericAlias(list, (values,)),
            Field(... if key == "strategy" else None, alias=key, min_length=1),
        )
        for number, (key, values) in enumerate(axes.items())
    }
    return create_model("Matrix", __config__=ConfigDict(extra="forbid"), **fields)


def fields_of(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the fields of a model by dotted key, a nested model before its fields."""
    for name, field in model.model_fields.items():
        yield f"{prefix}.{name}", field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields_of(field.annotation, f"{prefix}.{name}")


def _value(field: FieldInfo) -> Any:
    """Return the type of a field with its bounds and without its default."""
    return Annotated[field.annotation, *field.metadata, Field(description=field.description)]


def _either(first: Any, second: Any) -> Any:
    """Return the type of an option of two workloads or strategies: `Any` if their types differ."""
    return second if first is None or repr(first) == repr(second) else Any


@cache
def axis_keys() -> tuple[str, ...]:
    return tuple(str(field.alias) for field in matrix_model().model_fields.values())


def full_key(key: str) -> str:
    """Return the full key of an unambiguous short key: `recipe.optimizer.lr` of `optimizer.lr`."""
    first, dot, rest = key.partition(".")
    meanings = [
        full
        for full in axis_keys()
        if full.partition(".")[0] in SHORTENED and full.rpartition(".")[2] == first
    ]
    return f"{meanings[0]}{dot}{rest}" if len(meanings) == 1 else key


def check_matrix(matrix: Mapping[str, list[Any]], workload: object = None) -> None:
    """Raise pydantic's `ValidationError` for keys and values that cannot be an axis.

    A workload, and strategies of the matrix, may be those of other packages.
    """
    entries = [named(entry) for entry in matrix.get("strategy", ())]
    names = [entry.get("name") for entry in entries if isinstance(entry, Mapping)]
    registered = plugin_names(PLUGINS) if set(map(str, names)) - STRATEGIES.keys() else ()
    strategies = dict.fromkeys((*STRATEGIES, *(name for name in names if name in registered)))
    workloads = dict.fromkeys(TASKS.values())
    of_script = any("arguments" in entry for entry in entries if isinstance(entry, Mapping))
    if isinstance(workload, WorkloadOptions):
        workloads[type(workload)] = None
        of_script = isinstance(workload, ScriptOptions)
    if of_script:
        strategies.clear()
        _check_axes_of_script(matrix)
    matrix_model(tuple(strategies), tuple(workloads)).model_validate(matrix)
    cells = math.prod(len(values) for values in matrix.values())
    if cells > MAX_CELLS:
        refuse([mistake((), f"{cells:,} cells", f"allowed are at most {MAX_CELLS:,}", None)])
    mistakes = list(_contradictions(matrix))
    if mistakes:
        refuse(mistakes)


def _check_axes_of_script(matrix: Mapping[str, list[Any]]) -> None:
    """Raise pydantic's `ValidationError` for axes that a script decides."""
    if "strategy" not in matrix:
        form = 'give variant: {NAME: "ARGUMENTS"}'
        refuse([mistake((VARIANT,), "a script's matrix has none", form, None)])
    allowed = (*(f"recipe.{key}" for key in sorted(OF_SCRIPTS)), "measure", "placement")
    refused = [key for key in matrix if key not in MATRIX_ONLY_AXES and not key.startswith(allowed)]
    if refused:
        reason = f"the script decides {', '.join(refused)}"
        refuse([mistake((refused[0],), reason, "give it as arguments of a variant", None)])


def _contradictions(matrix: Mapping[str, list[Any]]) -> Iterator[InitErrorDetails]:
    for key in matrix:
        outer = key.rpartition(".")[0]
        if outer != "strategy" and outer in matrix:
            yield mistake((key,), f"{outer} is an axis, too, and sets it", "keep one", key)
    for index, entry in enumerate(matrix["strategy"]):
        for option in entry if isinstance(entry, Mapping) else ():
            axis = f"{'recipe' if option in SHARED_OPTIONS else 'strategy'}.{option}"
            if axis in matrix:
                at: Location = ("strategy", index, option)
                both = f"{show(entry[option])}, but {axis} is an axis of the matrix"
                yield mistake(at, both, "keep one of the two", entry[option])


def assigned(data: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """Return a copy with the value at the path; missing mappings are created."""
    first, *rest = path
    if not rest:
        return {**data, first: value}
    inner = data.get(first)
    return {**data, first: assigned(inner if isinstance(inner, Mapping) else {}, rest, value)}
