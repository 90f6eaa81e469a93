"""Which way of distributing training is best for my model on my machines?  Measured fairly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardmark.api.batch import largest_batches
    from shardmark.api.plan import plan
    from shardmark.api.run import Run, load, run
    from shardmark.core.errors import DataError, InputError, ShardmarkError, StrategyUnavailable

from shardmark.core.version import __version__

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
    "Run": "api.run",
    "largest_batches": "api.batch",
    "load": "api.run",
    "plan": "api.plan",
    "run": "api.run",
}
"""Name -> module, for the names that are not in `errors`; imported when first asked for."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'core.errors')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
