"""What a rank's memory holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from shardmark.report.figures.chart import Figure, Panel, Series, byte_unit, figure
from shardmark.report.figures.entries import Entry, Group, entries_in, having
from shardmark.results.schema import RankRecord

_STATE = (
    ("parameters", "parameter_bytes"),
    ("gradients", "gradient_bytes"),
    ("optimizer state", "optimizer_state_bytes"),
)
_OTHER = "activations and other"
_ALIKE = 0.02
"""Ranks whose every kind differs by no more than this share of the largest peak are one bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """What some ranks of a row hold alike."""

    role: str
    ranks: tuple[int, ...]
    bytes_by_kind: dict[str, float]

    @property
    def peak(self) -> float:
        return sum(self.bytes_by_kind.values())


def memory_figures(groups: Sequence[Group]) -> list[Figure]:
    """One stacked bar for the ranks of a row that hold alike."""
    held = {entry: ranks for entry in entries_in(groups) if (ranks := _held(entry))}
    largest = max((ranks.peak for bars in held.values() for ranks in bars), default=0.0)
    unit, size = byte_unit(largest)
    return figure(
        "memory",
        "Peak memory by kind and rank",
        [_panel(group, held, unit, size) for group in having(groups, held.__contains__)],
        "The most that tensors held at once on one rank, mean over the repeats. Activations and"
        " other: the peak without parameters, gradients and optimizer state, which are counted in"
        f" an untimed step. Ranks that differ by at most {_ALIKE:.0%} of the peak are one bar.",
    )


def _panel(group: Group, held: dict[Entry, list[_Held]], unit: str, size: float) -> Panel:
    bars = [
        (entry.number, name, ranks)
        for entry in group.entries
        for name, ranks in _bars(entry, held[entry])
    ]
    series = []
    for kind in (*(name for name, _ in _STATE), _OTHER):
        known = [bar for bar in bars if kind in bar[2].bytes_by_kind]
        if known:
            series.append(
                Series(
                    name=kind,
                    x=tuple(name for _, name, _ in known),
                    y=tuple(ranks.bytes_by_kind[kind] / size for *_, ranks in known),
                    style=kind,
                    rows=tuple(number for number, *_ in known),
                )
            )
    return Panel(
        title=group.title,
        kind="stacked",
        x_label="",
        y_label=f"Peak memory ({unit})",
        y_unit=unit,
        series=tuple(series),
        category_order=tuple(name for _, name, _ in bars),
    )


def _bars(entry: Entry, held: Sequence[_Held]) -> list[tuple[str, _Held]]:
    if len(held) == 1:
        return [(entry.bar, held[0])]
    return [(f"{entry.bar}: {_who(one)}", one) for one in held]


def _who(held: _Held) -> str:
    """`rank 0`, `ranks 1-3`, `server 4`."""
    word = "server" if held.role == "server" else "rank"
    if len(held.ranks) == 1:
        return f"{word} {held.ranks[0]}"
    whole = held.ranks == tuple(range(held.ranks[0], held.ranks[-1] + 1))
    numbers = f"{held.ranks[0]}-{held.ranks[-1]}" if whole else ", ".join(map(str, held.ranks))
    return f"{word}s {numbers}"


def _held(entry: Entry) -> list[_Held]:
    """By rank, ranks that hold alike together."""
    records: dict[int, list[RankRecord]] = {}
    for trial in entry.row.ok_trials:
        for record in trial.ranks:
            if record.lost is None:
                records.setdefault(record.rank, []).append(record)
    found: list[_Held] = []
    for rank, of_rank in sorted(records.items()):
        kinds = _kinds(of_rank)
        if kinds:
            found.append(_Held(role=of_rank[0].role, ranks=(rank,), bytes_by_kind=kinds))
    largest = max((one.peak for one in found), default=0.0)
    alike: list[list[_Held]] = []
    for one in found:
        place = next((held for held in alike if _same(held[0], one, largest)), None)
        if place is None:
            alike.append([one])
        else:
            place.append(one)
    return [_together(held) for held in alike]


def _kinds(records: Sequence[RankRecord]) -> dict[str, float]:
    """Mean over the repeats; the other bytes only where the peak and all kinds are known."""
    kinds = {}
    for name, attribute in _STATE:
        known = [
            value
            for record in records
            if record.probe is not None and (value := getattr(record.probe, attribute)) is not None
        ]
        if known:
            kinds[name] = fmean(known)
    peaks = [peak for record in records if (peak := _peak(record)) is not None]
    if peaks and len(kinds) == len(_STATE):
        kinds[_OTHER] = max(0.0, fmean(peaks) - sum(kinds.values()))
    return kinds


def _peak(record: RankRecord) -> int | None:
    if record.peak_memory_bytes is not None:
        return record.peak_memory_bytes
    return None if record.probe is None else record.probe.peak_memory_bytes


def _same(one: _Held, other: _Held, largest: float) -> bool:
    return (
        one.role == other.role
        and one.bytes_by_kind.keys() == other.bytes_by_kind.keys()
        and all(
            abs(one.bytes_by_kind[kind] - other.bytes_by_kind[kind]) <= _ALIKE * largest
            for kind in one.bytes_by_kind
        )
    )


def _together(held: Sequence[_Held]) -> _Held:
    return _Held(
        role=held[0].role,
        ranks=tuple(rank for one in held for rank in one.ranks),
        bytes_by_kind={
            kind: fmean(one.bytes_by_kind[kind] for one in held) for kind in held[0].bytes_by_kind
        },
    )
