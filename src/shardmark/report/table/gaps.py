"""Notes on what a table leaves out or does not know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardmark.analysis.compare.rows import Row


def left_out(rows: Sequence[Row]) -> list[str]:
    """Trials that did not end ok: they are in no number."""
    names = [
        f"{row.place} ({', '.join(f'{group.count} x {group.outcome}' for group in row.failed)})"
        for row in rows
        if row.failed
    ]
    return [f"Left out, not ok: {'; '.join(names)}."] if names else []


def by_reason(said_of: Iterable[tuple[str, str]], count: int) -> list[str]:
    """Each text once, with the places that it is said of unless those are all `count`."""
    places: dict[str, dict[str, None]] = {}
    for text, place in said_of:
        places.setdefault(text, {})[place] = None
    return [f"{text}{where(list(there), count)}." for text, there in places.items()]


def where(places: Sequence[str], count: int) -> str:
    """Which of so many rows, in brackets; nothing for all of them."""
    return "" if len(places) == count else f" ({'; '.join(places)})"
