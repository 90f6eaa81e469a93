"""Turns a model's class or function into a name that every rank can import.

Definitions of a notebook or a script are written to a module: ranks are other processes, and must
not run the notebook or the script.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import linecache
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from shardmark.base.errors import InputError
from shardmark.base.results.files import write_files
from shardmark.base.results.runs_folder import RUNS
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.load import resolve

LITERALS = (bool, int, float, complex, str, bytes, tuple, list, dict, set, type(None))
Definition = type | FunctionType


def resolve_experiment(
    experiment: str | Path | Mapping[str, Any] | Experiment,
    overrides: Mapping[str, Any],
    out: Path | None = None,
) -> Experiment:
    """Return the experiment with its overrides; write models of a notebook beside the run's folder.

    Raises `InputError` for an experiment that is not valid.
    """
    folder = (RUNS if out is None else out.parent) / "models"
    if not isinstance(experiment, Experiment):
        experiment = by_name(experiment, folder)
    return resolve(experiment, by_name(overrides, folder))


def by_name(value: object, folder: Path) -> Any:
    """Return the value with each class or function in it as its name, and each path as text."""
    if isinstance(value, Mapping):
        return {key: by_name(inner, folder) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [by_name(inner, folder) for inner in value]
    if isinstance(value, Path):
        return str(value)
    return model_name(value, folder) if callable(value) else value


def model_name(model: Callable[..., object], folder: Path) -> str:
    """Return `module:NAME`, or `FILE.py:NAME` of a new file in the folder.

    Raises `InputError` for an object that is no class or function, or cannot be written to a file.
    """
    if not isinstance(model, type | FunctionType):
        problem = f"found an object of {type(model).__name__}"
        raise InputError("model", problem, "allowed is the class or function that makes it")
    if model.__qualname__ != model.__name__ or not model.__name__.isidentifier():
        problem = f"{model.__qualname__} is defined inside another, or has no name"
        raise InputError("model", problem, "define it with a name, at the top level")
    if model.__module__ != "__main__":
        return f"{model.__module__}:{model.__name__}"
    text = module_text(model).encode()
    path = folder / f"{model.__name__}_{hashlib.sha256(text).hexdigest()[:8]}.py"
    if not path.exists():
        write_files({path: text})
    return f"{path}:{model.__name__}"


def module_text(model: Definition) -> str:
    """Return the definition, after all definitions of the notebook or script that it uses."""
    parts: dict[str, str] = {}
    _add(model.__name__, model, parts)
    head = '"""Written by Shardmark: a model of a notebook or script."""'
    return "\n\n".join([head, "from __future__ import annotations", *parts.values()]) + "\n"


def _add(name: str, value: object, parts: dict[str, str]) -> None:
    """Add the definition of the name to the module, after the definitions that it uses."""
    if name in parts:
        return
    parts[name] = ""  # a function may use itself
    text = _text(name, value, parts)
    del parts[name]
    parts[name] = text


def _text(name: str, value: object, parts: dict[str, str]) -> str:
    """Return source code that binds the name to the value."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
        if name != value.__name__:
            _add(value.__name__, value, parts)
            return f"{name} = {value.__name__}"
        text = _source(value)
        namespace = vars(sys.modules["__main__"])
        for used in sorted(_global_names(text)):
            if used in namespace and namespace[used] is not vars(builtins).get(used, parts):
                _add(used, namespace[used], parts)
        return text
    if isinstance(value, LITERALS) and _is_literal(value):
        return f"{name} = {value!r}"
    original_name = getattr(value, "__name__", name)
    for module_name, module in [*sys.modules.items()]:
        namespace = getattr(module, "__dict__", {})
        if module_name != "__main__" and namespace.get(original_name) is value:
            return f"from {module_name} import {original_name} as {name}"
    problem = f"it uses {name!r}, an object of {type(value).__name__} that only exists here"
    raise InputError("model", problem, "make it inside the model, or move the model to a module")


def _is_literal(value: object) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def _global_names(text: str) -> Iterator[str]:
    """Yield the global names that the source uses."""
    tables = [symtable.symtable(text, "model", "exec")]
    for table in tables:
        tables += table.get_children()
        yield from (symbol.get_name() for symbol in table.get_symbols() if symbol.is_global())


def _source(definition: Definition) -> str:
    """Return the lines of the class or function, with its decorators."""
    members = vars(definition).values() if isinstance(definition, type) else [definition]
    for member in members:
        function = inspect.unwrap(getattr(member, "__func__", member))
        code = getattr(function, "__code__", None)
        if code is None:
            continue
        lines = linecache.getlines(code.co_filename)
        for node in _definitions(lines, definition.__name__):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            last = node.end_lineno or 0
            if first <= code.co_firstlineno <= last:
                return textwrap.dedent("".join(lines[first - 1 : last]))
    problem = f"the source of {definition.__name__} cannot be found"
    raise InputError("model", problem, "write it into a file, and name it module:NAME")


def _definitions(lines: list[str], name: str) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    """Yield the classes and functions of that name in the source."""
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:  # a cell that awaits
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            yield node
