"""Columns that identify the rows of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from shardmark.base.cells import title_of
from shardmark.base.table.table import (
    Column,
    Columns,
    Item,
    Table,
    Value,
    for_items,
    for_programs,
    strategy_column,
    table_of,
)
from shardmark.bench.analysis.compare.rows import Row, plain

_name = partial(Column, numeric=False, names_row=True, shown_to="people")


def table_by_row(
    title: str, items: Sequence[tuple[Row, Item]], columns: Columns[Item], notes: Sequence[str] = ()
) -> Table:
    """Return a table with a line for each item: its row's identity, then the item's columns."""
    rows = row_columns([row for row, _ in items])
    all_columns = [*for_items(rows, itemgetter(0)), *for_items(columns, itemgetter(1))]
    return table_of(title, items, all_columns, notes)


def row_columns(rows: Sequence[Row]) -> Columns[Row]:
    """Return the columns that identify rows: varying axes for people, all fields for programs."""
    keys = list(dict.fromkeys(key for row in rows for key in row.shown_varied))
    by_axis = any(key.startswith("workload") for row in rows for key in row.varied)
    fields = ["experiment", *([] if by_axis else ["workload"]), "precision"]
    varying = [name for name in fields if len({getattr(row, name) for row in rows}) > 1]
    short = [title_of(key).rpartition(".")[2] for key in keys]

    def axis(key: str, title: str) -> tuple[Column, Callable[[Row], Value]]:
        column = _name(key, key if short.count(title) > 1 else title, numeric=True)
        return column, lambda row: None if row.varied.get(key) is None else plain(row.varied[key])

    def field(key: str) -> tuple[Column, Callable[[Row], Value]]:
        return for_programs(key), lambda row: identity_of(row).get(key)

    return [
        *((_name(name), attrgetter(name)) for name in varying),
        strategy_column(rows),
        (_name("ranks", numeric=True), ranks_of),
        *map(axis, keys, short),
        *map(field, dict.fromkeys(key for row in rows for key in identity_of(row))),
    ]


def identity_of(row: Row) -> dict[str, Any]:
    """Return the row's identity; varied keys have their dotted names."""
    return {
        "experiment": row.experiment,
        "workload": row.workload,
        "strategy": row.strategy,
        "strategy_options": dict(row.strategy_options),
        "world_size": row.world_size,
        "precision": row.precision,
        **row.varied,
        "synthetic": row.synthetic,
        "weak_scaling": row.weak_scaling,
        "equivalent": row.equivalent,
        "inherits": row.inherits,
        "mathematics": list(row.mathematics),
        "deviation": row.deviation,
        "diverged": row.diverged,
        "baseline": row.baseline,
        "verdict": row.verdict,
        "outcomes": dict(row.outcomes),
    }


def ranks_of(row: Row) -> str:
    """Return the number of training ranks, with servers behind a plus sign: `2+1`."""
    return f"{row.world_size}+{row.servers}" if row.servers else str(row.world_size)
