"""Parts that are found by name: those of this package, and those that other packages register."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

from shardmark.base.errors import InputError


def by_name(place: str) -> Callable[..., Any]:
    """Return a function that calls `package.module:function`, which is imported when called."""

    def call(*values: Any, **options: Any) -> Any:
        return resolve_name(place)(*values, **options)

    return call


def plugin_names(group: str) -> tuple[str, ...]:
    """Return the names that installed packages register in the group, sorted; imports none."""
    return tuple(sorted({entry.name for entry in entry_points(group=group)}))


def load_plugin(group: str, name: str, base: type[Any]) -> type[Any]:
    """Import the subclass of `base` that a package registers in the group under the name.

    Raises `InputError`, which names the package, if two packages register the name, or if it is
    not such a class or cannot be imported.
    """
    entries = tuple(entry_points(group=group, name=name))
    packages = " and ".join("unknown" if one.dist is None else one.dist.name for one in entries)
    place = f"{name} of package {packages}"
    if len(entries) != 1:
        raise InputError(place, f"{len(entries)} packages register {name!r}", "keep one of them")
    remedy = f"repair or uninstall {packages}"
    try:
        loaded = entries[0].load()
    except Exception as error:  # the code of the package runs, and may raise anything
        problem = f"cannot be loaded ({type(error).__name__}: {error})"
        raise InputError(place, problem, remedy) from error
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise InputError(place, f"{entries[0].value} is no subclass of {base.__name__}", remedy)
    return loaded
