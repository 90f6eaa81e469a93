"""Several tables below one another, each with its heading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from shardmark.report.table.latex import PACKAGES, latex_section, render_latex
from shardmark.report.table.markdown import escape_markdown, markdown_section, render_markdown
from shardmark.report.table.tables import Table
from shardmark.report.table.text import render_text, wrapped


class Markup(StrEnum):
    """A form for people."""

    TEXT = "text"
    MARKDOWN = "markdown"
    LATEX = "latex"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    title: str
    table: Table


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One way to look at a comparison, in every form; nothing is computed before it is asked."""

    key: str
    """In JSON, beside `rows`."""
    sections: Callable[[], Sequence[Section]]
    data: Callable[[], object]
    """For JSON: base units, None where something is missing."""
    csv: Callable[[], str]


def render_table(
    table: Table, markup: Markup, width: int | None = None, caption: str | None = None
) -> str:
    """A table without a heading, in LaTeX with a caption; ends with a line break."""
    if markup is Markup.MARKDOWN:
        return render_markdown(table)
    if markup is Markup.LATEX:
        return f"{PACKAGES}\n\n{render_latex(table, caption)}"
    return render_text(table, width)


def render_sections(
    sections: Iterable[Section], markup: Markup = Markup.TEXT, width: int | None = None
) -> str:
    """Each below its heading, which LaTeX makes a caption; ends with a line break."""
    if markup is Markup.MARKDOWN:
        return "\n".join(
            f"### {escape_markdown(one.title)}\n\n{render_markdown(one.table)}" for one in sections
        )
    if markup is Markup.LATEX:
        tables = (render_latex(one.table, one.title) for one in sections)
        return "\n".join([f"{PACKAGES}\n", *tables])
    return "\n".join(f"{one.title}\n\n{render_text(one.table, width)}" for one in sections)


def render_points(
    title: str, points: Sequence[str], markup: Markup, width: int | None = None
) -> str:
    """A heading with sentences below; ends with a line break."""
    if markup is Markup.MARKDOWN:
        return markdown_section(title, points)
    if markup is Markup.LATEX:
        return latex_section(title, points)
    return f"{title}\n\n" + "".join(wrapped(point, width) for point in points)
