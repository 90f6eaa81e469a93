"""LaTeX that TeX reads: every special character escaped, as many cells as columns, notes listed."""

from __future__ import annotations

import re

import pytest

from shardmark.report.table.latex import escape_latex, latex_section, render_latex
from shardmark.report.table.tables import Column, Table, comparison_table
from tests.golden.invented import invented_trial
from tests.unit.report_compare.runs import compared
from tests.unit.report_compare.tex import check_tex


def table(*columns: Column, notes: tuple[str, ...] = ()) -> Table:
    return Table(columns=columns, notes=notes)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("a_b & 5 % of #1 for $2", r"a\_b \& 5 \% of \#1 for \$2"),
        ("{x}", r"\{x\}"),
        ("\\input{/etc/passwd}", r"\textbackslash{}input\{/etc/passwd\}"),
        ("~/data^2", r"\textasciitilde{}/data\textasciicircum{}2"),
        ("a<b>c|d", r"a\textless{}b\textgreater{}c\textbar{}d"),
        ('`x` "y"', r"\textasciigrave{}x\textasciigrave{} {''}y{''}"),
        ("[2pt] *", "{[}2pt{]} {*}"),
        ("--epochs", "-{}-epochs"),
        ("---", "-{}-{}-"),
        ("1 ±2", r"1 $\pm$2"),
        ("≥ ≤ → \N{MULTIPLICATION SIGN} µ", r"$\geq$ $\leq$ $\to$ $\times$ $\mu$"),
        ("two\nlines\tand\r\nmore", "two lines and  more"),
        ("\x1b[31mred\x00\u202e", "{[}31mred"),
        ("Zürich", "Zürich"),
        ("", ""),
    ],
)
def test_text_is_printed_as_it_is(text: str, printed: str) -> None:
    assert escape_latex(text) == printed


def test_whatever_stands_in_a_name_is_text() -> None:
    every = "".join(map(chr, range(0x20, 0x17F))) + "\u200b\ud800\U0001f600"
    for one in (every, every[::-1], every * 2, "\\end{tabular}", "$x$ % & --", "\\\\[1em]"):
        shown = table(
            Column(title=one, cells=(one,)), Column(title="x", cells=(one,)), notes=(one,)
        )
        check_tex(render_latex(shown, one))
        check_tex(latex_section(one, [one]))


@pytest.mark.parametrize("wrong", ["a_b", "5 %", "a & b", "$x", "{", "}", r"\input x", r"\pm", "~"])
def test_the_check_would_find_what_is_not_escaped(wrong: str) -> None:
    with pytest.raises((AssertionError, IndexError)):
        check_tex(wrong)


def test_structure() -> None:
    made = render_latex(
        table(
            Column(title="strategy", cells=("fsdp_x", "[ddp]"), numeric=False),
            Column(title="samples/s", cells=("402.0 ±25.4", "-")),
            Column(title="eff.\n%", cells=("-1.50", "-0.5 to -0.25")),
            notes=("5 % less: `x`.", "second"),
        ),
        caption="a_b",
    )
    assert made.splitlines() == [
        r"\begin{table}[htbp]",
        r"  \centering",
        r"  \caption{a\_b}",
        r"  \sbox0{\begin{tabular}{@{}lrr@{}}",
        r"    \toprule",
        r"    strategy & samples/s & eff. \\",
        r"     &  & \% \\",
        r"    \midrule",
        r"    fsdp\_x & 402.0\,$\pm$\,25.4 & $-$1.50 \\",
        r"    {[}ddp{]} & -- & $-$0.5 to $-$0.25 \\",
        r"    \bottomrule",
        r"  \end{tabular}}%",
        r"  \ifdim\wd0>\linewidth\resizebox{\linewidth}{!}{\usebox0}\else\usebox0\fi",
        "",
        r"  \raggedright\footnotesize",
        r"  \begin{itemize}",
        r"    \item 5 \% less: \textasciigrave{}x\textasciigrave{}.",
        r"    \item second",
        r"  \end{itemize}",
        r"\end{table}",
    ]
    assert made.endswith("}\n")


def test_a_table_without_rows_is_its_notes() -> None:
    made = render_latex(table(notes=("nothing",)))
    assert "tabular" not in made
    assert r"\item nothing" in made
    assert r"\caption" not in made
    assert "itemize" not in render_latex(table(Column(title="a", cells=("1",))))


def test_titles_of_one_line_make_one_line() -> None:
    lines = render_latex(table(Column(title="a", cells=("1",)))).splitlines()
    assert lines.index(r"    \midrule") - lines.index(r"    \toprule") == 2


def test_section_is_a_list_below_a_heading() -> None:
    assert latex_section("Which & when", ["10 %"]).splitlines() == [
        r"\subsection*{Which \& when}",
        r"\begin{itemize}",
        r"  \item 10 \%",
        r"\end{itemize}",
    ]
    assert latex_section("x", []) == "\\subsection*{x}\n"


def test_a_real_comparison_has_its_cells_in_every_line() -> None:
    hostile = invented_trial("ddp", 2, strategy_options={"wrap": "a&b_c%$#{}\\~^"})
    trials = [invented_trial("single", 1, repeat) for repeat in (0, 1)]
    shown = comparison_table(compared(*trials, hostile))
    lines = render_latex(shown).splitlines()
    first, last = lines.index(r"    \toprule"), lines.index(r"    \bottomrule")
    inside = [line for line in lines[first + 1 : last] if line != r"    \midrule"]
    assert len(inside) == 4
    for line in inside:
        assert line.endswith(r" \\")
        assert len(re.findall(r"(?<!\\)&", line)) == len(shown.columns) - 1
    check_tex(render_latex(shown))
    assert not any(line.startswith("    [") or line.startswith("    *") for line in inside)
