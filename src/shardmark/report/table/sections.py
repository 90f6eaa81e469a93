"""Tables of ready text, for views that do not yet build typed ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardmark.analysis.compare.rows import Row, plain
from shardmark.config.axes import NODES
from shardmark.report.table.formats import Format, render_tables
from shardmark.report.table.table import Column, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class TextColumn:
    """A line break in the title divides a name from its unit."""

    title: str
    cells: tuple[str, ...]
    numeric: bool = True
    key: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    columns: tuple[TextColumn, ...]
    notes: tuple[str, ...]

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        return tuple(zip(*(column.cells for column in self.columns), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    title: str
    table: TextTable


def as_table(section: Section) -> Table:
    """The typed table of these texts."""
    columns = []
    for index, column in enumerate(section.table.columns):
        title, _, unit = column.title.partition("\n")
        columns.append(
            Column(
                key=f"{index}",
                title=title,
                unit=unit,
                numeric=column.numeric,
                names_row=column.key,
            )
        )
    return Table(
        title=section.title,
        columns=tuple(columns),
        rows=section.table.rows,
        notes=section.table.notes,
    )


def render_sections(
    sections: Iterable[Section], form: Format = Format.TEXT, width: int | None = None
) -> str:
    return render_tables([as_table(section) for section in sections], form, width)


def text_columns(table: Table) -> tuple[TextColumn, ...]:
    """The typed table's columns as people see them."""
    columns, rows = table.for_people()
    return tuple(
        TextColumn(
            title=f"{column.title}\n{column.unit}" if column.unit else column.title,
            cells=tuple(row[index] for row in rows),
            numeric=column.numeric,
            key=column.names_row,
        )
        for index, column in enumerate(columns)
    )


def variants(rows: Sequence[Row]) -> list[TextColumn]:
    """What tells rows of one strategy and number of ranks apart; no column where nothing does."""
    cells = variant_cells(rows)
    columns = [TextColumn(title="variant", cells=cells, numeric=False)] if any(cells) else []
    return columns + nodes_column(rows)


def nodes_column(rows: Sequence[Row | None]) -> list[TextColumn]:
    """None where no row says its nodes; an empty cell where there is no row."""
    cells = tuple("" if row is None else plain(row.varied.get(NODES, "")) for row in rows)
    return [TextColumn(title="nodes", cells=cells)] if any(cells) else []


def variant_cells(rows: Sequence[Row]) -> tuple[str, ...]:
    """Experiment and precision where they differ, then the varied values but for the nodes."""
    experiments = len({row.experiment for row in rows}) > 1
    precisions = len({row.precision for row in rows}) > 1
    return tuple(
        ", ".join(
            [
                *([row.experiment] if experiments else []),
                *([row.precision] if precisions else []),
                *(plain(value) for key, value in row.varied.items() if key != NODES),
            ]
        )
        for row in rows
    )
