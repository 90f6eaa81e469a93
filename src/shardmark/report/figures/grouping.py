"""Which rows stand together in a panel, and what each is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardmark.analysis.compare.epochs import EpochsOfRow, epochs_of
from shardmark.analysis.compare.rows import Row, plain
from shardmark.report.figures.looks import short

LONGEST_NAME = 40
LONGEST_TITLE = 60
MOST_ROWS_READ = 24
"""Rows whose raw files are read for one figure."""
MOST_FACETS = 6
"""Settings in one figure; more make a second one."""
MOST_BARS = 36
"""Horizontal bars in one figure."""
MOST_FIGURES = 2
"""Of one kind."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """A row and how it is shown."""

    row: Row
    epochs: EpochsOfRow
    name: str
    """The strategy with its options, short, and no other strategy's."""
    variant: int
    """Which of the strategy's sets of options."""

    @property
    def style(self) -> str:
        return self.row.strategy

    @property
    def ranks(self) -> str:
        """Workers, and servers beside them."""
        trials = self.row.trials
        servers = max((sum(r.role == "server" for r in t.ranks) for t in trials), default=0)
        if servers:
            return f"{self.row.world_size}+{servers} ranks"
        return "1 rank" if self.row.world_size == 1 else f"{self.row.world_size} ranks"

    @property
    def bar(self) -> str:
        """Name of its bar."""
        return f"{self.name}, {self.ranks}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows under the same conditions; they differ in strategy and number of ranks."""

    title: str
    """Only what differs from the other groups; empty for a single one."""
    entries: tuple[Entry, ...]
    of: str = ""
    """Title of the group that this is a facet of: what trains the same has the same."""


def groups_of(rows: Sequence[Row]) -> tuple[Group, ...]:
    """The rows that ended ok at least once, by everything but strategy and number of ranks."""
    names = _names(rows)
    variants = _variants(rows)
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for row in rows:
        if row.ok_trials:
            entry = Entry(
                row=row,
                epochs=epochs_of(row),
                name=names[row.label],
                variant=variants[row.label],
            )
            groups.setdefault(_conditions(row), []).append(entry)
    columns = list(zip(*(conditions for conditions in groups), strict=True))
    differing = [len(set(column)) > 1 for column in columns]
    titles = [
        ", ".join(part for part, shown in zip(conditions, differing, strict=True) if shown and part)
        for conditions in groups
    ]
    return tuple(
        Group(title=title, entries=tuple(sorted(entries, key=lambda one: one.row.world_size)))
        for title, entries in zip(_distinct(titles, LONGEST_TITLE), groups.values(), strict=True)
    )


def with_metric(groups: Sequence[Group], metric: str) -> list[Group]:
    """Without the entries that lack it."""
    kept = [
        replace(
            group,
            entries=tuple(one for one in group.entries if one.row.metrics[metric] is not None),
        )
        for group in groups
    ]
    return [group for group in kept if group.entries]


def facets_of(groups: Sequence[Group]) -> tuple[Group, ...]:
    """The groups by number of ranks; what exists on one rank alone stands beside all others."""
    found: list[Group] = []
    for group in groups:
        sizes = sorted({entry.row.world_size for entry in group.entries})
        alone = [entry for entry in group.entries if _only_on_one(entry, group)]
        for size in sizes:
            here = [e for e in group.entries if e.row.world_size == size and e not in alone]
            if here or sizes == [1]:
                title = "1 rank" if size == 1 else f"{size} ranks"
                parts = [part for part in (group.title, title) if part]
                entries = (*alone, *here)
                found.append(Group(title=", ".join(parts), entries=entries, of=group.title))
    if len(found) == len(groups):  # one number of ranks each: nothing to tell apart
        return tuple(
            replace(facet, title=group.title) for facet, group in zip(found, groups, strict=True)
        )
    return tuple(found)


def _only_on_one(entry: Entry, group: Group) -> bool:
    sizes = {one.row.world_size for one in group.entries if one.name == entry.name}
    return sizes == {1} and any(one.row.world_size > 1 for one in group.entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one of several figures of a kind shows."""

    ending: str
    """Of the figure's name."""
    groups: tuple[Group, ...]
    note: str
    """That there is more than the figures show; empty where there is not."""

    @property
    def one_condition(self) -> bool:
        """Whether all train the same, so that their values may share an axis."""
        return len({group.of for group in self.groups}) == 1


def in_parts(groups: Sequence[Group]) -> list[Part]:
    """Portions of at most `MOST_FACETS` groups."""
    return _parts([groups[at : at + MOST_FACETS] for at in range(0, len(groups), MOST_FACETS)])


def by_bars(groups: Sequence[Group]) -> list[Part]:
    """Portions of at most `MOST_BARS` entries, for figures that give each a bar."""
    portions: list[list[Group]] = []
    for group in groups:
        for first in range(0, len(group.entries), MOST_BARS):
            piece = replace(group, entries=group.entries[first : first + MOST_BARS])
            held = sum(len(one.entries) for one in portions[-1]) if portions else MOST_BARS
            if held + len(piece.entries) > MOST_BARS:
                portions.append([])
            portions[-1].append(piece)
    return _parts(portions)


def _parts(portions: Sequence[Sequence[Group]]) -> list[Part]:
    shown = portions[:MOST_FIGURES]
    more = sum(len(portion) for portion in portions[MOST_FIGURES:])
    note = f"{more} more settings are in the tables alone." if more else ""
    return [
        Part(
            ending="" if number == 1 else f"-{number}",
            groups=tuple(portion),
            note=note if number == len(shown) else "",
        )
        for number, portion in enumerate(shown, start=1)
    ]


def _conditions(row: Row) -> tuple[str, ...]:
    """Always as many, so that each can be compared with another row's."""
    varied = ", ".join(
        f"{key.rpartition('.')[2]} {plain(value)}" for key, value in row.varied.items()
    )
    workload = row.trials[0].trial.get("workload", {})
    by_axis = any(key.startswith("workload") for key in row.varied)
    words = ["" if by_axis else str(workload.get(key, "")) for key in ("name", "model", "dataset")]
    return (row.experiment, *words, row.precision, varied)


def _names(rows: Sequence[Row]) -> dict[str, str]:
    labels = list(dict.fromkeys(row.label for row in rows))
    return dict(zip(labels, _distinct(labels, LONGEST_NAME), strict=True))


def _variants(rows: Sequence[Row]) -> dict[str, int]:
    found: dict[str, dict[str, int]] = {}
    for row in sorted(rows, key=lambda row: len(row.strategy_options)):
        of_strategy = found.setdefault(row.strategy, {})
        of_strategy.setdefault(row.label, len(of_strategy))
    return {label: number for labels in found.values() for label, number in labels.items()}


def _distinct(texts: Sequence[str], longest: int) -> list[str]:
    """Shortened, and numbered where two of them would be the same."""
    found: list[str] = []
    for text in texts:
        name, number = short(text, longest), 1
        while name and name in found:
            number += 1
            name = f"{short(text, longest - 4)} ({number})"
        found.append(name)
    return found
