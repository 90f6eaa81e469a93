"""The scripts of `examples/`, which are installed with the package."""

from __future__ import annotations

from difflib import SequenceMatcher
from importlib.resources import files

ONE_DEVICE = "single"
"""The example that the others are compared with."""


def example_text(name: str) -> str:
    return files("shardmark").joinpath("examples", f"{name}.py").read_text(encoding="utf-8")


def code_lines(name: str) -> list[str]:
    """Return the lines of an example without its docstring, comments and blank lines."""
    _, _, code = example_text(name).split('"""', 2)
    lines = (line.partition("#")[0].rstrip() for line in code.splitlines())
    return [line for line in lines if line]


def changed_lines(name: str) -> int:
    """Return the number of lines that are added, changed or removed, compared with one device."""
    matcher = SequenceMatcher(None, code_lines(ONE_DEVICE), code_lines(name), autojunk=False)
    return sum(
        max(old_end - old, new_end - new)
        for tag, old, old_end, new, new_end in matcher.get_opcodes()
        if tag != "equal"
    )
