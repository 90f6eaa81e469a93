"""A table that is wider than the reader continues below, with the names of its rows."""

from __future__ import annotations

import pytest

from shardmark.report.table.sections import (
    Markup,
    Section,
    render_points,
    render_sections,
    render_table,
)
from shardmark.report.table.tables import Column, Table, comparison_table
from shardmark.report.table.text import blocks, render_text
from tests.golden.invented import invented_trial
from tests.unit.report_compare.runs import compared
from tests.unit.report_compare.tex import check_tex

WORDS = "many words " * 30


def table(*titles: str) -> Table:
    names = (
        Column(title="strategy", cells=("ddp", "fsdp"), numeric=False, key=True),
        Column(title="ranks", cells=("2", "4"), key=True),
    )
    others = (Column(title=title, cells=("1.5", "22.5")) for title in titles)
    return Table(columns=(*names, *others), notes=("A note.",))


def test_a_table_that_fits_is_whole() -> None:
    shown = table("samples/s", "peak\nMiB")
    assert render_text(shown, 80) == render_text(shown) == render_text(shown, 32)
    assert render_text(shown).splitlines()[0] == "strategy  ranks  samples/s  peak"


def test_without_units_the_rule_follows_the_titles() -> None:
    lines = render_text(table("loss", "mAP")).splitlines()
    assert lines[:2] == ["strategy  ranks  loss   mAP", "--------  -----  ----  ----"]


def test_a_wider_one_repeats_the_names() -> None:
    assert render_text(table("samples/s", "peak\nMiB", "loss"), 27).splitlines() == [
        "strategy  ranks  samples/s",
        "--------  -----  ---------",
        "ddp           2        1.5",
        "fsdp          4       22.5",
        "",
        "strategy  ranks  peak  loss",
        "                  MiB",
        "--------  -----  ----  ----",
        "ddp           2   1.5   1.5",
        "fsdp          4  22.5  22.5",
        "",
        "A note.",
    ]


@pytest.mark.parametrize("width", [1, 20, 40, 60, 80, 100, 120, 200])
def test_no_column_is_lost_and_no_line_too_long(width: int) -> None:
    trials = [invented_trial("single", 1, repeat) for repeat in (0, 1)]
    shown = comparison_table(compared(*trials, invented_trial("ddp", 2, repeat=1)))
    parts = blocks(shown.columns, width)
    told = [column.title for part in parts for column in part if not column.key]
    assert told == [column.title for column in shown.columns if not column.key]
    keys = [column.title for column in shown.columns if column.key]
    assert all([one.title for one in part if one.key] == keys for part in parts)
    if width >= 40:
        body = render_text(shown, width).partition("\n\n" + shown.notes[0][:10])[0]
        assert max(map(len, body.splitlines())) <= width


def test_a_column_beyond_every_width_stands_alone() -> None:
    wide = Column(title="why", cells=("x" * 50, ""), numeric=False)
    whole = Table(columns=(*table("a").columns, wide, *table("b").columns[2:]), notes=())
    titles = [[one.title for one in part] for part in blocks(whole.columns, 30)]
    assert titles == [
        ["strategy", "ranks", "a"],
        ["strategy", "ranks", "why"],
        ["strategy", "ranks", "b"],
    ]


def test_notes_follow_the_reader_up_to_what_is_readable() -> None:
    def longest(width: int | None) -> int:
        return max(map(len, render_text(Table(columns=(), notes=(WORDS,)), width).splitlines()))

    assert longest(60) <= 60
    assert longest(None) <= 98
    assert longest(500) == longest(None)
    assert longest(5) <= 40


def test_sections_have_headings_in_every_form() -> None:
    sections = [
        Section(title="One | <b>", table=table("a")),
        Section(title="Two", table=Table(columns=(), notes=("Nothing.",))),
    ]
    text = render_sections(sections)
    assert text.startswith("One | <b>\n\nstrategy")
    assert text.endswith("\nTwo\n\nNothing.\n")
    markdown = render_sections(sections, Markup.MARKDOWN)
    assert "### One \\| &lt;b>\n\n| strategy" in markdown
    assert markdown.endswith("### Two\n\n- Nothing.\n")
    latex = render_sections(sections, Markup.LATEX)
    check_tex(latex)
    assert latex.startswith("% needs \\usepackage{booktabs,graphicx}\n")
    assert latex.count(r"\begin{table}") == 2
    assert r"\caption{One \textbar{} \textless{}b\textgreater{}}" in latex


def test_only_latex_has_a_caption() -> None:
    assert "cap" not in render_table(table("a"), Markup.TEXT, caption="cap")
    assert "cap" not in render_table(table("a"), Markup.MARKDOWN, caption="cap")
    latex = render_table(table("a"), Markup.LATEX, caption="cap")
    assert r"\caption{cap}" in latex
    check_tex(latex)


def test_points_are_a_list_or_paragraphs() -> None:
    points = ("Fastest: ddp <2>.", WORDS)
    text = render_points("Which", points, Markup.TEXT, 60)
    assert text.startswith("Which\n\nFastest: ddp <2>.\nmany words")
    assert "\n  words many" in text
    markdown = render_points("Which", points, Markup.MARKDOWN)
    assert markdown.startswith("### Which\n\n- Fastest: ddp &lt;2>.\n- many")
    latex = render_points("Which", points, Markup.LATEX)
    assert r"\item Fastest: ddp \textless{}2\textgreater{}." in latex
    check_tex(latex)


def test_blocks_are_about_equally_wide() -> None:
    """Two and two, although three would fit beside the names."""
    parts = blocks(table("aaaa", "bbbb", "cccc", "dddd").columns, 35)
    assert [[one.title for one in part[2:]] for part in parts] == [
        ["aaaa", "bbbb"],
        ["cccc", "dddd"],
    ]
