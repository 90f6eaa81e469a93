"""The pages of the repository: their code blocks and their commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from shardmark.cli import app
from tests import ROOT

README = ROOT / "README.md"
FOLDERS = ("tutorial", "guides", "method", "reference", "studies", "decisions")
PAGES = (
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "AGENTS.md",
    ROOT / "CHANGELOG.md",
    ROOT / "skills" / "shardmark" / "SKILL.md",
    ROOT / "docs" / "index.md",
    ROOT / "docs" / "architecture.md",
    *(page for folder in FOLDERS for page in sorted((ROOT / "docs" / folder).glob("*.md"))),
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str, *pages: Path) -> Iterator[tuple[str, str]]:
    """Find the code blocks of a language: the line where each begins, and its text."""
    for page in pages or PAGES:
        text = page.read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            if found[1] == language:
                line = text.count("\n", 0, found.start()) + 1
                yield f"{page.relative_to(ROOT)}:{line}", found[2]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each command in a block of shell code, as words."""
    for place, text in blocks("bash"):
        for line in text.splitlines():
            for part in line.split("&&"):
                words = shlex.split(part, comments=True)
                if words:
                    yield f"{place} {part.strip()}", words


def own_commands() -> Iterator[tuple[str, list[str]]]:
    """The arguments of each command that is `shardmark`."""
    for place, words in commands():
        if words[0] == "shardmark":
            yield place, words[1:]


def inline_commands() -> Iterator[tuple[str, list[str]]]:
    """Each command in running text, save a bare verb and those with a placeholder."""
    for page in PAGES:
        text = BLOCK.sub("", page.read_text(encoding="utf-8"))
        for found in re.findall(r"`shardmark ([^`]+)`", text):
            words = shlex.split(found)
            if len(words) > 1 and not any(re.fullmatch(r"[A-Z]+[.=]*", word) for word in words):
                yield f"{page.relative_to(ROOT)} {found}", words


def cases(pairs: Iterator[tuple[str, Any]]) -> list[Any]:
    return [pytest.param(value, id=place) for place, value in pairs]


@cache
def program() -> typer.core.TyperGroup:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    return group


def parse(arguments: list[str]) -> dict[str, Any]:
    """Parse the arguments as the command line does, without running the command."""
    group = program()
    with group.make_context("shardmark", [*arguments]) as context:
        verb = group.get_command(context, arguments[0])
        assert verb is not None, f"no such command: {arguments[0]}"
        with verb.make_context(arguments[0], arguments[1:], parent=context) as inner:
            return dict(inner.params)
