"""Every format of one table: what is shown, what is escaped, and nothing is lost."""

from __future__ import annotations

import csv
import io
import json
import math
from typing import Any

import pytest

from shardmark.base.statistics.intervals import Estimate
from shardmark.base.table.formats import Format, records, render_points, render_tables
from shardmark.base.table.table import (
    Column,
    Missing,
    Table,
    Value,
    metric_column,
    number,
    table_of,
)
from shardmark.base.text import render_json

HOSTILE = '\x1b[31mred\n=1+2 a&b_c%$#{}\\~^<b>|`"[*'


def column(key: str = "x", **fields: Any) -> Column:
    return Column(**({"key": key, "title": key} | fields))


def table(*others: tuple[Column, Value], notes: tuple[str, ...] = ("A note.",)) -> Table:
    """Two rows, of ddp and fsdp; the other columns hold the same value twice."""
    columns = (
        column("strategy", numeric=False, names_row=True),
        column("ranks", names_row=True),
        *(other for other, _ in others),
    )
    values = tuple(value for _, value in others)
    rows = (("ddp", 2, *values), ("fsdp", 4, *values))
    return Table(title="Title | <b>", columns=columns, rows=rows, notes=notes)


def estimate(value: float, low: float | None = None, high: float | None = None) -> Estimate:
    return Estimate(value=value, low=low, high=high, n=2)


@pytest.mark.parametrize(
    ("fields", "value", "text"),
    [
        ({}, None, "-"),
        ({}, Missing("why"), "-"),
        ({}, True, "yes"),
        ({}, 3, "3"),
        ({"scale": 1000.0}, estimate(0.159), "159"),
        ({"interval": "±"}, estimate(734.7, 642.1, 826.9), "735 ±93"),
        ({"interval": "±"}, estimate(8318.2, 6882, 9754), "8300 ±1400"),
        ({"interval": "±"}, estimate(366019985, 341201029, 390838941), "366M ±25M"),
        ({"interval": "±"}, estimate(4.5678, 4.5557, 4.5799), "4.57 ±0.01"),
        ({"interval": "±"}, estimate(8318.2, 8317, 8319.4), "8320 ±1"),
        ({"interval": "±"}, estimate(0.0, 0.0, 0.0), "0.00 ±0"),
        ({"interval": "±"}, estimate(734.7), "735"),
        ({"interval": "to", "decimals": 2}, estimate(1.8, 1.72, 1.95), "1.80 (1.72 to 1.95)"),
        ({"interval": "to", "decimals": 2}, estimate(1.0, 1.0, 1.0), "1.00"),
        ({}, {"a": 1}, '{"a": 1}'),
        ({}, "two\nlines\x1b[31m\u202e", "two lines"),
    ],
)
def test_values_are_formatted_for_people(fields: dict[str, Any], value: Value, text: str) -> None:
    assert column(**fields).show(value) == text


def test_bytes_are_in_the_unit_of_the_largest() -> None:
    for largest, shown in ((2048.0, ("KiB", "2")), (5 * 2.0**30, ("GiB", "5"))):
        made = table_of("", [largest, None], [(column(unit="bytes"), lambda item: item)])
        assert (made.columns[0].unit, made.cells("x")[0]) == shown
        assert made.values("x")[0] == largest


def test_a_wide_text_table_continues_below_with_the_names() -> None:
    wide = table(
        (column("samples/s"), 1.5), (column("peak", unit="MiB"), 22.5), (column("empty"), None)
    )
    shown = render_tables([wide], headings=False)
    assert shown.splitlines() == [
        "strategy  ranks  samples/s  peak",
        "                             MiB",
        "--------  -----  ---------  ----",
        "ddp           2       1.50  22.5",
        "fsdp          4       1.50  22.5",
        "",
        "A note.",
    ]
    assert render_tables([wide], width=32, headings=False) == shown
    divided = render_tables([wide], width=31, headings=False)
    assert divided.count("strategy  ranks") == 2
    assert max(map(len, divided.splitlines())) <= 31
    notes = Table(title="", columns=(), rows=(), notes=("many words " * 30,))
    for width, most in ((5, 40), (None, 98)):
        assert max(map(len, render_tables([notes], width=width).splitlines())) <= most


def test_latex_is_the_table_of_pandas_with_comments() -> None:
    columns = ((column("eff.", unit="%"), "-1.50"), (column("why", numeric=False), "a_b & \\c"))
    made = render_tables([table(*columns)], Format.LATEX)
    assert made.startswith("% Title | <b>\n% A note.\n\\begin{tabular}{lrrl}\n\\toprule\n")
    assert r"ddp & 2 & -1.50 & a\_b \& \textbackslash c \\" in made
    assert render_tables([table_of("", (), (), ["5 %"])], Format.LATEX) == "% 5 %\n"
    assert render_points(["a", "b"], Format.LATEX) == "% a\n% b\n"


EVERY = "".join(map(chr, range(0x20, 0x17F))) + "\u200b\U0001f600"


@pytest.mark.parametrize(
    "text", [HOSTILE, EVERY, EVERY[::-1], "\\end{tabular}", "$x$ % & --", "\\\\[1em]"]
)
def test_special_characters_are_escaped_in_every_format(text: str) -> None:
    columns = (column(text, numeric=False, names_row=True), column("a|b", title=text))
    shown = Table(title=text, columns=columns, rows=((text, text),), notes=(text,))
    lines = render_tables([shown], Format.MARKDOWN).splitlines()
    for line in (*lines, *render_tables([shown], Format.TEXT, 500).splitlines()):
        assert line.isprintable()
    rows = [line.replace("\\|", "") for line in lines if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1


def test_markdown_is_a_table_and_a_list() -> None:
    made = render_tables([table((column("peak", unit="MiB"), "a | b\n<c>"))], Format.MARKDOWN)
    assert made.splitlines() == [
        "### Title \\| &lt;b>",
        "",
        "| strategy | ranks | peak MiB |",
        "| :--- | ---: | ---: |",
        "| ddp | 2 | a \\| b &lt;c> |",
        "| fsdp | 4 | a \\| b &lt;c> |",
        "",
        "- A note.",
    ]


def test_programs_get_base_units_and_reasons() -> None:
    rate = column("rate", scale=100, estimated=True, base_unit="samples/s", shown_to="programs")
    made = table(
        (rate, estimate(1.0, 0.5, 2.0)),
        (column("lost", estimated=True), Missing("no sensor")),
        (column("ours", shown_to="people"), 1),
    )
    assert records(made)[0] == {
        "strategy": "ddp",
        "ranks": 2,
        "rate": {"value": 1.0, "low": 0.5, "high": 2.0, "unit": "samples/s", "n": 2},
        "lost": None,
        "missing": {"lost": "no sensor"},
    }
    assert "100.0" not in render_tables([made])
    other = Table(title="", columns=(column("more"),), rows=((True,),))
    first, _, last = csv.DictReader(io.StringIO(render_tables([made, other], Format.CSV)))
    assert (first["rate_low"], first["lost"], first["more"]) == ("0.5", "", "")
    assert (last["more"], last["strategy"]) == ("true", "")
    assert "ours" not in first
    assert json.loads(render_tables([made, other], Format.JSON))[2] == {"more": True}
    with pytest.raises(ValueError, match="Out of range"):
        render_json([math.inf])


@pytest.mark.parametrize(
    ("value", "decimals", "shown"),
    [
        (1.2345e30, None, "1.23e+30"),
        (-2.5e12, 1, "-2.50e+12"),
        (1_309_273.0, 0, "1309273"),
        (123_456_789.0, 4, "1.23e+08"),
        (0.04631, None, "0.0463"),
    ],
)
def test_huge_numbers_are_powers_of_ten(value: float, decimals: int | None, shown: str) -> None:
    """A loss that diverges must not burst its column."""
    assert number(value, decimals=decimals) == shown


def test_predictions_have_few_digits() -> None:
    shown = [number(value, digits=2) for value in (0.1814, 18.14, 1126.45, 2_345_678.0)]
    assert shown == ["0.18", "18", "1100", "2300000"]
    assert Column("hours", "hours", digits=3).show(67.4713) == "67.5"
    assert Column("hours", "hours", digits=3).show(8.0) == "8"


def test_huge_intervals_are_powers_of_ten() -> None:
    huge = Estimate(value=2e30, low=1e30, high=3e30, n=3)
    assert metric_column("validation_loss", interval="±").show(huge) == "2.00e+30 ±1.00e+30"
    assert metric_column("train_loss", interval="to").show(huge).endswith("(1.00e+30 to 3.00e+30)")
    wide = Estimate(value=2.5, low=1.0, high=4e12, n=3)
    assert metric_column("validation_loss", interval="±").show(wide) == "2.5000 ±4.00e+12"
