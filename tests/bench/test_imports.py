"""The package has every name that the benchmarks import; nothing else runs them in CI."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

SOURCES = ROOT / "src"
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))


def file_of(module: str) -> Path | None:
    path = SOURCES / module.replace(".", "/")
    found = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in found if file.is_file()), None)


def bound_names(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda path: str(path.relative_to(ROOT)))
def test_imported_names_are_defined_in_their_module(benchmark: Path) -> None:
    """From the module that defines the name, not from one that happens to import it."""
    for node in ast.walk(ast.parse(benchmark.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardmark."):
            file = file_of(str(node.module))
            assert file is not None, node.module
            for name in (alias.name for alias in node.names):
                there = name in set(bound_names(file)) or file_of(f"{node.module}.{name}")
                assert there, f"{node.module} has no {name}"
