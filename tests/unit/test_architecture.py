"""The map of `docs/architecture.md` agrees with the code, and the house does not grow."""

from __future__ import annotations

import ast
import re
import runpy
import tomllib
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from tests import ROOT

PAGE = ROOT / "docs" / "architecture.md"
SOURCE = ROOT / "src" / "shardmark"

REACHED: Mapping[str, tuple[tuple[str, ...], int, int]] = {
    "audit": (("cli/audit.py", "scripts/observer.py", "audit/replay.py"), 39, 9_759),
    "compare": (("cli/compare.py",), 69, 11_022),
    "plan": (("cli/plan.py",), 115, 22_312),
    "run": (("cli/run.py",), 152, 27_678),
    "time": (("cli/time.py",), 159, 29_052),
    "verify": (("cli/verify.py",), 135, 24_845),
}
"""Verb -> files where it begins, and the most files and lines that it may reach from there.

Imports inside of functions count, those for type checking do not.  A ceiling only falls: a change
that needs more makes something else smaller, or says in its commit why it raises a ceiling.
"""
RANK_OF_DDP = (56, 8_917)
"""Files and lines that `docs/architecture.md` lists: without imports inside of functions."""
SOURCE_LINES = 75_408
SHORT_HELPERS = 154
"""Private functions of at most 6 lines with one caller: a reader jumps for each of them."""
WRONG_ARROWS = 0
"""Imports that `pyproject.toml` excepts from the contract of the parts."""
SLACK = 1.02
"""A ceiling that is further above the code is lowered."""


@pytest.fixture(scope="module")
def imports() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "reference" / "imports.py"))


def test_the_page_lists_the_imported_files(imports: dict[str, Any]) -> None:
    page = PAGE.read_text()
    assert imports["BEGIN"] in page
    assert imports["END"] in page
    assert imports["with_section"](page) == page, "run python docs/reference/imports.py"


def test_the_steps_name_files_that_are_imported(imports: dict[str, Any]) -> None:
    _, _, steps = PAGE.read_text().partition("| step | file |")
    table = steps.partition("\n\n")[0]
    imported = {
        file for entries in imports["ENTRIES"].values() for file in imports["closure"](entries)
    }
    named = set(re.findall(r"`([\w/]+\.py)`", table))
    assert len(named) > 10
    assert named <= imported


@pytest.mark.parametrize("verb", REACHED)
def test_a_verb_reaches_no_more_than_before(verb: str) -> None:
    entries, files, lines = REACHED[verb]
    reached, pending = set[Path](), [SOURCE / entry for entry in entries]
    while pending:
        file = pending.pop()
        if file not in reached:
            reached.add(file)
            pending += imported(file)
    held(f"files of {verb}", len(reached), files)
    held(f"lines of {verb}", sum(map(lines_of, reached)), lines)


def test_a_rank_imports_no_more_than_before(imports: dict[str, Any]) -> None:
    files, lines = RANK_OF_DDP
    imported = imports["closure"](imports["ENTRIES"]["rank"])
    held("files of a rank", len(imported), files)
    held("lines of a rank", sum(lines_of(SOURCE / file) for file in imported), lines)


def test_the_source_does_not_grow() -> None:
    held("lines of src", sum(map(lines_of, SOURCE.rglob("*.py"))), SOURCE_LINES)


def test_no_more_helpers_are_read_for_one_caller() -> None:
    held("short helpers", sum(map(short_helpers, SOURCE.rglob("*.py"))), SHORT_HELPERS)


def test_no_more_imports_point_the_wrong_way() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    parts = project["tool"]["importlinter"]["contracts"][0]
    held("wrong arrows", len(parts.get("ignore_imports", ())), WRONG_ARROWS)


def held(measure: str, found: int, ceiling: int) -> None:
    assert found <= ceiling, f"{measure}: {found}, at most {ceiling}"
    assert ceiling <= SLACK * found, f"{measure}: {found}, lower the ceiling of {ceiling}"


@cache
def lines_of(file: Path) -> int:
    return len(file.read_text().splitlines())


@cache
def imported(file: Path) -> list[Path]:
    """Files of the package that a file imports at run time, in functions too."""
    found: list[Path] = []
    pending: list[ast.AST] = [ast.parse(file.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                for alias in names:
                    found += module_file(f"{module}.{alias.name}") or module_file(module)
            case ast.Import(names=names):
                for alias in names:
                    found += module_file(alias.name)
        pending += ast.iter_child_nodes(node)
    return found


def module_file(name: str) -> list[Path]:
    if not name.startswith("shardmark."):
        return []
    place = SOURCE.joinpath(*name.split(".")[1:])
    files = (place.with_suffix(".py"), place / "__init__.py")
    return [file for file in files if file.is_file()]


def short_helpers(file: Path) -> int:
    """Number of a file's private functions of at most 6 lines that it names once."""
    tree = ast.parse(file.read_text())
    nodes = list(ast.walk(tree))
    named = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in nodes
        if isinstance(node, ast.Name | ast.Attribute)
    )
    return sum(
        isinstance(node, ast.FunctionDef)
        and re.match(r"_[a-z]", node.name) is not None
        and not node.decorator_list
        and (node.end_lineno or 0) - node.lineno < 6
        and named[node.name] == 1
        and node.name not in overridden()
        for node in nodes
    )


@cache
def overridden() -> set[str]:
    """Names of methods that several classes define: one may call what another one overrides."""
    trees = (ast.parse(file.read_text()) for file in SOURCE.rglob("*.py"))
    classes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    names = Counter(
        item.name for found in classes for item in found.body if isinstance(item, ast.FunctionDef)
    )
    return {name for name, count in names.items() if count > 1}


def test_every_part_that_is_found_by_name_exists() -> None:
    texts = (file.read_text() for file in SOURCE.rglob("*.py"))
    places = {place for text in texts for place in re.findall(r'"(shardmark\.[\w.]+:\w+)"', text)}
    assert len(places) > 10
    for place in places:
        assert callable(resolve_name(place)), place
