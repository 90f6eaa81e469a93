"""Runs when an interpreter of an observed script starts; installs hooks as soon as torch is there.

The folder of this file precedes others on `PYTHONPATH`.  A `sitecustomize` of the user runs too.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType

BOOTSTRAP_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - start-up imports little


class AfterImport(importlib.abc.MetaPathFinder):
    """Lets modules be imported as always, and calls a function at the end of the import."""

    def __init__(self, calls: dict[str, Callable[[ModuleType], None]]) -> None:
        self._calls = calls
        self._finding: set[str] = set()

    def find_spec(
        self, fullname: str, _path: object = None, _target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._calls or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding.remove(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            call = self._calls.pop(fullname, None)  # a library may look for it without an import
            if call is not None:
                call(module)

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def _install_hooks(_torch: ModuleType) -> None:
    """Call the function `module:function` that the environment names."""
    sys.path.append(os.environ["SHARDMARK_PATH"])  # the script's environment may lack the package
    module, _, function = os.environ["SHARDMARK_HOOKS"].partition(":")
    getattr(importlib.import_module(module), function)()


def _run_next_sitecustomize() -> None:
    """Run the `sitecustomize` that this file hides."""
    paths = [path for path in sys.path if os.path.abspath(path or ".") != BOOTSTRAP_FOLDER]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    AT_START = {"path": [*sys.path], "environment": {**os.environ}, "folder": os.getcwd()}  # noqa: PTH109
    """State of this interpreter before the script has changed it."""
    if os.environ.get("SHARDMARK_HOOKS"):
        sys.meta_path.insert(0, AfterImport({"torch": _install_hooks}))
    _run_next_sitecustomize()
