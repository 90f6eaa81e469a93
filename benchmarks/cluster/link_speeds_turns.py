"""Where the order of strategies turns as links become slower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from benchmarks.cluster.link_speeds import Speed, group_of, labels_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A pair whose order is shown at two speeds, and is another at each."""

    first: str
    """Faster over the faster links."""
    second: str
    before: str
    """The slowest speed so far at which `first` is shown to be faster."""
    after: str
    """The next one at which `second` is."""


def turns_of(speeds: Sequence[Speed]) -> list[Turn]:
    """All of them, from the fastest links on; speeds at which nothing is shown are passed over."""
    found = []
    for one, other in combinations(labels_of(speeds), 2):
        leader: str | None = None
        last = ""
        for speed in speeds:
            now = speed.faster(one, other)
            if now is None:
                continue
            if leader is not None and now != leader:
                found.append(Turn(first=leader, second=now, before=last, after=speed.name))
            leader, last = now, speed.name
    return found


def crossings_of(speeds: Sequence[Speed]) -> set[frozenset[str]]:
    """Pairs whose means have not the same order at every speed, shown or not."""
    found = set()
    for one, other in combinations(labels_of(speeds), 2):
        both = [speed.cells for speed in speeds if one in speed.cells and other in speed.cells]
        if not all(group_of(cells[one].row) == group_of(cells[other].row) for cells in both):
            continue
        if len({cells[one].step.value < cells[other].step.value for cells in both}) > 1:
            found.add(frozenset((one, other)))
    return found
