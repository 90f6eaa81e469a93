"""Runs when an interpreter of an observed script starts; installs hooks as soon as torch is there.

The folder of this file precedes others on `PYTHONPATH`.  A `sitecustomize` of the user runs too.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType

BOOTSTRAP_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - start-up imports little


def _install_hooks() -> None:
    """Call the function `module:function` that the environment names."""
    sys.path.append(os.environ["SHARDMARK_PATH"])  # the script's environment may lack the package
    module, _, function = os.environ["SHARDMARK_HOOKS"].partition(":")
    getattr(importlib.import_module(module), function)()


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Lets torch be imported as always, and installs the hooks at the end of its import."""

    def find_spec(
        self, fullname: str, _path: object = None, _target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            execute(module)
            _install_hooks()

        spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


def _run_next_sitecustomize() -> None:
    """Run the `sitecustomize` that this file hides."""
    paths = [path for path in sys.path if os.path.abspath(path or ".") != BOOTSTRAP_FOLDER]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("SHARDMARK_HOOKS"):
    sys.meta_path.insert(0, _AfterTorch())
_run_next_sitecustomize()
