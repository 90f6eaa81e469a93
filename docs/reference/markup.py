"""How a generated page is written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MADE = "<!-- Made by docs/reference/generate.py; change what it reads, not this page. -->"


def page(title: str, lines: Iterable[str]) -> str:
    return "\n".join([f"# {title}", "", MADE, "", *lines]).rstrip() + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    shown = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(map(cell, row)) + " |" for row in shown] + [""]


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def code(value: object) -> str:
    return f"`{value}`"


def paragraphs(text: str) -> list[str]:
    found = re.split(r"\n\s*\n", text.strip())
    return [line for paragraph in found for line in (" ".join(paragraph.split()), "")]
