"""Docstrings and comments begin as sentences, and names of the source say what they hold."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardmark

SOURCE = Path(shardmark.__file__).parent
ROOMS = sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file())
FOLDERS = {room: SOURCE / room for room in ROOMS} | {"tests": Path(__file__).parents[1]}
FRAGMENT = re.compile(
    r"(Of|Where|What|Whether|One|Those|By|Whose|Who|As|How|All|Why|Which|Its|In|For|With)\b"
)
"""First words of lines that cannot be understood without the code below or above them."""
COMMENT_FRAGMENT = re.compile(r"#\s*(of|in|by|for|with)\b")
BANNED_NAMES = frozenset(
    re.findall(
        r"\w+",
        """
        agenda alike apart carried each everybody found given held here hollow how judge kept
        known lacks mended mine nothing of ours own passed passing said settle settled taken
        taken_up theirs there told undivided what where whole whose why
        """,
    )
)
"""Everyday words that would stand for a different thing in every file."""

STORED_FIELDS = {
    "ranks/measure/system/machine_checks.py": {"found"},  # a key in the JSON of `doctor`
    "base/evidence/checks.py": {"found", "where"},  # keys of verification.json
    "extras/studies/study.py": {"of"},  # a key of the YAML files of studies
}
"""Banned names that stay, by file, because files are stored with them."""


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_and_comments_begin_as_sentences(folder: str) -> None:
    offenders = [
        f"{path.relative_to(FOLDERS[folder])}:{line}: {text}"
        for path in sorted(FOLDERS[folder].rglob("*.py"))
        for line, text in (*docstrings(path), *comments(path))
        if (COMMENT_FRAGMENT if text.startswith("#") else FRAGMENT).match(text)
    ]
    assert not offenders, "\n".join([f"{len(offenders)} fragments", *offenders])


@pytest.mark.parametrize("room", ROOMS)
def test_a_name_says_what_it_holds(room: str) -> None:
    offenders = [
        f"{place}: {name}"
        for path in sorted((SOURCE / room).rglob("*.py"))
        for place, name in defined_names(path)
        if name.strip("_").lower() in BANNED_NAMES
        and name not in STORED_FIELDS.get(str(path.relative_to(SOURCE)), ())
    ]
    assert not offenders, "\n".join([f"{len(offenders)} names", *offenders])


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and first line of every text that documents a module, class, function or attribute."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        before: ast.stmt | None = None
        for statement in node.body:
            documents = before is None or isinstance(before, ast.Assign | ast.AnnAssign)
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))) if documents:
                    yield statement.lineno, text.strip().partition("\n")[0]
            before = statement


def comments(path: Path) -> Iterator[tuple[int, str]]:
    with path.open() as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def defined_names(path: Path) -> Iterator[tuple[str, str]]:
    """Place and name of every class, function, parameter, variable and attribute."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.arg(arg=name):
                yield f"{path.relative_to(SOURCE)}:{node.lineno}", name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield f"{path.relative_to(SOURCE)}:{node.lineno}", name
