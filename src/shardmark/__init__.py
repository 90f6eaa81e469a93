"""Which way of distributing training is best for my model on my machines?  Measured fairly."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardmark.base.errors import DataError, InputError, ShardmarkError, StrategyUnavailable
    from shardmark.bench.run import Run, load, run
    from shardmark.predict.api import largest_batches, plan

from shardmark.base.version import __version__

__all__ = [
    "DataError",
    "InputError",
    "Run",
    "ShardmarkError",
    "StrategyUnavailable",
    "__version__",
    "largest_batches",
    "load",
    "plan",
    "run",
]

_HOMES = {
    "Run": "bench.run",
    "largest_batches": "predict.api",
    "load": "bench.run",
    "plan": "predict.api",
    "run": "bench.run",
}
"""Name -> module, for the names that are not in `errors`; imported when first asked for."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'base.errors')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
