"""Which way of distributing training is best for my model on my machines?  Measured fairly."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
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


_MOVED = {
    f"{__name__}.{old}": f"{__name__}.{new}"
    for old, new in {
        "core": "base",
        "strategies": "ranks.strategies",
        "workloads": "ranks.workloads",
    }.items()
}
"""Old name -> name of the packages that strategies and workloads of others import."""


class _MovedModules(Loader):
    """Imports modules by the names that they had up to version 0.2."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        for old, new in _MOVED.items():
            if f"{name}.".startswith(f"{old}."):
                return ModuleSpec(name, self, origin=new + name[len(old) :])
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(str(spec.origin))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do not run the module again; it keeps the name under which it was found."""
        module.__spec__ = module.__spec__ and module.__spec__.loader_state


sys.meta_path.insert(0, _MovedModules())  # before the finder that would load a file twice
