"""Modules and files of users, found without importing anything."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def looked_in(path: str | Path) -> str:
    """The places where a relative path is looked up, as the end of a message; else empty."""
    relative = not Path(path).expanduser().is_absolute()
    return f" in the current folder {Path.cwd()} or beside the experiment file" if relative else ""


def find_without_import(module: str, folders: Iterable[Path] = ()) -> ModuleSpec | None:
    """Find a module like `find_spec`, which imports parent packages, and these may import torch.

    `folders` are searched before Python's own.
    """
    locations: list[str] | None = [*map(str, folders), str(Path.cwd()), *sys.path]
    spec: ModuleSpec | None = None
    for name in module.split("."):
        if locations is None:
            return None
        # By its last part: below a folder without __init__.py Python looks up loaded parents.
        spec = PathFinder.find_spec(name, locations)
        if spec is None:
            return None
        below = spec.submodule_search_locations
        locations = None if below is None else list(below)
    return spec
