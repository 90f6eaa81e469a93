"""A table as LaTeX, for a paper; needs the packages booktabs and graphicx."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

from shardmark.report.table.tables import NOTHING, Column, Table

PACKAGES = r"% needs \usepackage{booktabs,graphicx}"

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    '"': "{''}",
    "[": "{[}",
    "]": "{]}",
    "*": "{*}",
    "±": r"$\pm$",
    "\N{MULTIPLICATION SIGN}": r"$\times$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "≈": r"$\approx$",
    "→": r"$\to$",
    "\N{MINUS SIGN}": "$-$",
    "\N{MICRO SIGN}": r"$\mu$",
    "\N{GREEK SMALL LETTER MU}": r"$\mu$",
    "\N{EN DASH}": r"\textendash{}",
    "\N{EM DASH}": r"\textemdash{}",
    "…": r"\ldots{}",
}
"""Brackets and stars are braced because a line break takes one that follows it as its argument."""
_ESCAPES = str.maketrans(_SPECIAL)
_LIGATURE = re.compile("-(?=-)")
_MINUS = re.compile(r"(?<![\w.)])-(?=[\d.])")


def render_latex(table: Table, caption: str | None = None) -> str:
    """A floating table with rules of booktabs, the notes as a list below; ends with a line break.

    What is wider than the line is scaled down to it.
    Every character that TeX would read as a command is escaped; letters outside ASCII stay as they
    are, in UTF-8.
    """
    lines = [r"\begin{table}[htbp]", r"  \centering"]
    if caption is not None:
        lines.append(rf"  \caption{{{escape_latex(caption)}}}")
    if any(column.cells for column in table.columns):
        lines += _tabular(table.columns)
    if table.notes:
        lines += ["", r"  \raggedright\footnotesize", *_list(table.notes, "  ")]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def latex_section(title: str, points: Sequence[str]) -> str:
    """An unnumbered heading with a list; ends with a line break."""
    heading = rf"\subsection*{{{escape_latex(title)}}}"
    return "\n".join([heading, *(_list(points, "") if points else [])]) + "\n"


def escape_latex(text: str) -> str:
    """The text as TeX prints it: white space becomes blanks, other control characters vanish."""
    blank = "".join(" " if one.isspace() else one for one in text)
    printed = "".join(one for one in blank if not unicodedata.category(one).startswith("C"))
    return _LIGATURE.sub("-{}", printed.translate(_ESCAPES))


def _tabular(columns: Sequence[Column]) -> list[str]:
    form = "".join("r" if column.numeric else "l" for column in columns)
    titles = [column.title.partition("\n") for column in columns]
    heads = [_line(escape_latex(name) for name, _, _ in titles)]
    if any(unit for _, _, unit in titles):
        heads.append(_line(escape_latex(unit) for _, _, unit in titles))
    body = (
        _line(_cell(text, column) for text, column in zip(row, columns, strict=True))
        for row in zip(*(column.cells for column in columns), strict=True)
    )
    inner = [r"\toprule", *heads, r"\midrule", *body, r"\bottomrule"]
    return [
        rf"  \sbox0{{\begin{{tabular}}{{@{{}}{form}@{{}}}}",
        *(f"    {line}" for line in inner),
        r"  \end{tabular}}%",
        r"  \ifdim\wd0>\linewidth\resizebox{\linewidth}{!}{\usebox0}\else\usebox0\fi",
    ]


def _cell(text: str, column: Column) -> str:
    """Numbers get a real minus, and a narrow gap around ±."""
    if text == NOTHING:
        return "--"
    if not column.numeric:
        return escape_latex(text)
    parts = (escape_latex(part) for part in _MINUS.split(text))
    return "$-$".join(parts).replace(r" $\pm$", r"\,$\pm$\,")


def _line(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _list(points: Sequence[str], indent: str) -> list[str]:
    items = (rf"{indent}  \item {escape_latex(point)}" for point in points)
    return [rf"{indent}\begin{{itemize}}", *items, rf"{indent}\end{{itemize}}"]
