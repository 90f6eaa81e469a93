"""Groups the rows of a comparison for figures, and names them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress

from shardmark.base.cells import ranks_and_nodes
from shardmark.base.statistics.intervals import Estimate
from shardmark.bench.analysis.compare.epochs import EpochsOfRow, epochs_of
from shardmark.bench.analysis.compare.rows import Row, gathered, plain
from shardmark.bench.report.figures.chart import Series
from shardmark.bench.report.figures.drawing import short

LONGEST_NAME = 40
LONGEST_TITLE = 60
MOST_ROWS_READ = 24
"""Largest number of rows whose raw files are read for a figure."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """A row with the name and the style that figures give it."""

    row: Row
    number: int
    """Number of the row in the comparison."""
    epochs: EpochsOfRow
    name: str
    """Short, unique name of the strategy with its options."""
    style: int
    """Number of the strategy with its options in the comparison."""

    @property
    def ranks(self) -> str:
        """Return the number of workers, and that of servers behind a plus sign."""
        ranks = ranks_and_nodes(self.row.world_size, 1)
        servers = self.row.servers
        return f"{ranks} + {servers} server{'s' if servers > 1 else ''}" if servers else ranks

    @property
    def bar(self) -> str:
        return f"{self.name}, {self.ranks}"

    def line(self, x: Sequence[float], y: Sequence[float]) -> Series:
        return Series(name=self.name, x=tuple(x), y=tuple(y), style=self.style,
                      rows=(self.number,))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rows under the same conditions; they differ in strategy and number of ranks."""

    title: str
    """Conditions that differ from those of the other groups; empty for a single group."""
    entries: tuple[Entry, ...]

    def by_name(self) -> list[list[Entry]]:
        """Return the entries of each strategy, ordered by the number of ranks."""
        return [*gathered((entry.name, entry) for entry in self.entries).values()]


def groups_of(rows: Sequence[Row]) -> list[Group]:
    """Group the rows that ended ok by all conditions except strategy and number of ranks."""
    labels = list(dict.fromkeys(row.label for row in rows))
    names = dict(zip(labels, _distinct(labels, LONGEST_NAME), strict=True))
    entries_of_rows = (
        Entry(
            row=row,
            number=number,
            epochs=epochs_of(row),
            name=names[row.label],
            style=labels.index(row.label),
        )
        for number, row in enumerate(rows)
        if row.ok_trials
    )
    groups = gathered((_conditions(entry.row), entry) for entry in entries_of_rows)
    columns = list(zip(*groups, strict=True))
    differing = [len(set(column)) > 1 for column in columns]
    titles = [", ".join(filter(None, compress(conditions, differing))) for conditions in groups]
    return [
        Group(title=title, entries=tuple(sorted(entries, key=lambda entry: entry.row.world_size)))
        for title, entries in zip(_distinct(titles, LONGEST_TITLE), groups.values(), strict=True)
    ]


def having(groups: Sequence[Group], has: Callable[[Entry], object]) -> list[Group]:
    """Return the groups with only those entries that have something to draw."""
    filtered = [replace(group, entries=tuple(filter(has, group.entries))) for group in groups]
    return [group for group in filtered if group.entries]


def facets_of(groups: Sequence[Group]) -> list[Group]:
    """Divide groups by number of ranks; strategies on one rank alone are in each."""
    facets: list[Group] = []
    for group in groups:
        sizes = sorted({entry.row.world_size for entry in group.entries})
        several = {entry.name for entry in group.entries if entry.row.world_size > 1}
        alone = [entry for entry in group.entries if several and entry.name not in several]
        for size in sizes:
            of_this_size = [e for e in group.entries if e.row.world_size == size and e not in alone]
            if of_this_size or sizes == [1]:
                title = ", ".join(filter(None, (group.title, ranks_and_nodes(size, 1))))
                facets.append(Group(title=title, entries=(*alone, *of_this_size)))
    if len(facets) == len(groups):  # Each group has one number of ranks.
        return [replace(f, title=group.title) for f, group in zip(facets, groups, strict=True)]
    return facets


def entries_in(groups: Iterable[Group]) -> list[Entry]:
    return [entry for group in groups for entry in group.entries]


def estimates_of(entries: Iterable[Entry], metric: str) -> list[Estimate]:
    """Return the estimate of each entry that has the metric."""
    return [value for entry in entries if (value := entry.row.metrics[metric]) is not None]


def epoch_estimates(entries: Iterable[Entry], metric: str) -> list[Estimate]:
    epochs = (epoch for entry in entries for epoch in entry.epochs.epochs)
    return [estimate for epoch in epochs if (estimate := epoch.metrics.get(metric)) is not None]


def estimates_series(
    entries: Sequence[Entry],
    x: Sequence[float] | Sequence[str],
    estimates: Sequence[Estimate],
    scale: float = 1,
    *,
    timed: bool,
) -> Series:
    """Return the line, points or bars of entries of one name, with intervals.

    Other work disturbs `timed` values only, not bytes or qualities.
    """
    return replace(
        entries[0].line((), ()),
        x=tuple(x),  # type: ignore[arg-type]  # a tuple of one of the two kinds
        y=tuple(estimate.value * scale for estimate in estimates),
        low=tuple(None if e.low is None else e.low * scale for e in estimates),
        high=tuple(None if e.high is None else e.high * scale for e in estimates),
        rows=tuple(entry.number for entry in entries),
        faint=tuple(timed and entry.row.disturbed is not None for entry in entries),
    )


def reliability(entries: Sequence[Entry], estimates: Sequence[Estimate] = ()) -> str:
    """Return a sentence about the repeats and the whiskers.

    The repeats are those of the entries' times, or of the estimates that are drawn.
    """
    counts = sorted({e.n for e in estimates} or {len(entry.row.ok_trials) for entry in entries})
    if not counts:
        return ""
    repeats = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    text = f"Means of {repeats} repeats; whiskers or bands are 95 % intervals of the mean."
    if counts == [1]:
        text = "One repeat each: there is no interval."
    return text


def rows_read(count: int) -> str:
    return f"Of {count} rows the first {MOST_ROWS_READ}." if count > MOST_ROWS_READ else ""


def _conditions(row: Row) -> tuple[str, ...]:
    """Return the row's conditions, the same number for every row."""
    varied = ", ".join(
        f"{key.rpartition('.')[2]} {plain(value)}" for key, value in row.shown_varied.items()
    )
    workload = row.trials[0].trial.get("workload", {})
    by_axis = any(key.startswith("workload") for key in row.varied)
    words = ["" if by_axis else str(workload.get(key, "")) for key in ("name", "model", "dataset")]
    return (row.experiment, *words, row.precision, varied)


def _distinct(texts: Sequence[str], longest: int) -> list[str]:
    """Shorten the texts, and number those that would be equal."""
    names: list[str] = []
    for text in texts:
        name, number = short(text, longest), 1
        while name and name in names:
            number += 1
            name = f"{short(text, longest - 4)} ({number})"
        names.append(name)
    return names
