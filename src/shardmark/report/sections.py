"""Several tables below one another, each with its heading."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardmark.report.markdown import render_markdown
from shardmark.report.tables import Table
from shardmark.report.text import render_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    title: str
    table: Table


def render_sections(sections: Iterable[Section], *, markdown: bool) -> str:
    """Ends with a line break."""
    if markdown:
        return "\n".join(f"### {one.title}\n\n{render_markdown(one.table)}" for one in sections)
    return "\n".join(f"{one.title}\n\n{render_text(one.table)}" for one in sections)
