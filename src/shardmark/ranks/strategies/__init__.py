"""The table of strategies, and those of other packages.  Importing it imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache, partial
from pkgutil import resolve_name
from typing import Any

from pydantic import TypeAdapter, ValidationError

from shardmark.base.errors import InputError
from shardmark.base.system.plugins import load_plugin, plugin_names
from shardmark.ranks.strategies.base import Strategy


class BuiltIn:
    """Factory of a built-in strategy; its module is imported when the strategy is needed."""

    package = __name__

    def __init__(self, place: str, **options: Any) -> None:
        """`place` is module:class below the package; the name of the strategy fixes `options`."""
        self.place = place
        self.options = options

    def load(self) -> Callable[..., Strategy]:
        """Import the class; where options are fixed, return a partial with them."""
        loaded: Callable[..., Strategy] = resolve_name(f"{self.package}.{self.place}")
        return partial(loaded, **self.options) if self.options else loaded

    def __call__(self, **options: Any) -> Strategy:
        return self.load()(**options)


class Extra(BuiltIn):
    """Factory of a strategy among the extras, which nothing imports by itself."""

    package = "shardmark.extras"


STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "single": BuiltIn("single:Single"),
    "dp": BuiltIn("data_parallel:DataParallel"),
    "ddp": BuiltIn("ddp:DDP"),
    "fsdp": BuiltIn("fsdp:FSDP"),
    "fsdp-grad-op": BuiltIn("fsdp:FSDP", name="fsdp-grad-op", reshard_after_forward=False),
    "fsdp-hybrid": BuiltIn("fsdp:HybridFSDP"),
    "zero-0": BuiltIn("deepspeed.strategy:Zero", name="zero-0", stage=0),
    "zero-1": BuiltIn("deepspeed.strategy:Zero", name="zero-1", stage=1),
    "zero-2": BuiltIn("deepspeed.strategy:Zero", name="zero-2", stage=2),
    "zero-3": BuiltIn("deepspeed.strategy:Zero", name="zero-3", stage=3),
    "zro": BuiltIn("zro.strategy:ZeroRedundancy"),
    "fsdp1": BuiltIn("fsdp1.strategy:FullyShardedFirst"),
    "local-sgd": Extra("local_steps.strategy:LocalSGD"),
    "diloco": Extra("local_steps.strategy:DiLoCo"),
    "tp": BuiltIn("layers.strategies:TensorParallel"),
    "fsdp-tp": BuiltIn("layers.strategies:ShardedTensorParallel"),
    "pp": BuiltIn("layers.strategies:PipelineParallel"),
    "ddp-pp": BuiltIn("layers.strategies:ReplicatedPipeline"),
    "fsdp-pp": BuiltIn("layers.strategies:ShardedPipeline"),
    "fsdp-tp-pp": BuiltIn("layers.strategies:ShardedTensorPipeline"),
    "ulysses": BuiltIn("layers.ulysses:Ulysses", name="ulysses", sharded=False),
    "fsdp-ulysses": BuiltIn("layers.ulysses:Ulysses", name="fsdp-ulysses", sharded=True),
    "ps-sync": Extra("parameter_server.strategy:ParameterServer"),
    "ps-async": Extra("parameter_server.strategy:AsynchronousServer"),
    "ps-bounded": Extra("parameter_server.strategy:BoundedServer"),
}

PLUGINS = "shardmark.strategies"
"""Group of the entry points by which other packages register data classes of strategies."""

SHARED_OPTIONS = (
    *("precision", "weights", "activation_checkpointing", "gradient_accumulation"),
    *("cpu_offload", "compile", "channels_last"),
)
"""Keys of the recipe that an entry of `matrix.strategy` may override."""


@cache
def strategy_factory(name: str) -> Callable[..., Strategy]:
    """Return the built-in strategy of that name, or import the one that a package registers.

    Raises `InputError` for an unknown name and for a package that cannot be imported.
    """
    if (factory := STRATEGIES.get(name)) is not None:
        return factory.load() if isinstance(factory, BuiltIn) else factory
    if name in plugin_names(PLUGINS):
        registered: Callable[..., Strategy] = load_plugin(PLUGINS, name, Strategy)
        return partial(registered, name=name)
    names = (*STRATEGIES, *plugin_names(PLUGINS))
    raise InputError("strategy", f"there is no strategy {name!r}", _allowed(name, names))


def strategy_class(name: str) -> type[Any]:
    """Return the data class behind a strategy's name."""
    factory = strategy_factory(name)
    data_class = factory.func if isinstance(factory, partial) else factory
    assert isinstance(data_class, type)
    return data_class


def fixed_options(name: str) -> dict[str, Any]:
    """Return the options that the name itself sets, such as {"stage": 2} for `zero-2`."""
    factory = strategy_factory(name)
    return dict(factory.keywords) if isinstance(factory, partial) else {}


def option_names(name: str) -> tuple[str, ...]:
    """Return the names of the options that the strategy accepts."""
    fixed = {"name", *fixed_options(name)}
    return tuple(field.name for field in fields(strategy_class(name)) if field.name not in fixed)


def build_strategy(name: str, options: Mapping[str, Any]) -> Strategy:
    """Build the strategy of that name.

    Raises `InputError` that names the nearest name, key or type.
    """
    allowed = option_names(name)
    for key in options:
        if key not in allowed:
            raise InputError(
                f"strategy {name}", f"it has no option {key!r}", _allowed(key, allowed)
            )
    try:
        adapter = _adapter(strategy_class(name))  # type: ignore[arg-type]  # classes are hashable
        built = adapter.validate_python({**fixed_options(name), **options})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"strategy {name}, option {key}", f"found {first['input']!r}", first["msg"]
        ) from None
    return built  # type: ignore[no-any-return]  # TypeAdapter of a class chosen at run time


@cache
def _adapter(data_class: type[Any]) -> TypeAdapter[Any]:
    """Cached: it takes milliseconds, and a plan builds the strategy of each of its trials."""
    return TypeAdapter(data_class)


def _allowed(value: str, names: tuple[str, ...]) -> str:
    nearest = difflib.get_close_matches(value, names, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"{hint}allowed: {', '.join(names) or 'none'}"
