"""What a rank's memory holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from shardmark.report.figures.chart import Figure, byte_unit, figure, stacked_panel
from shardmark.report.figures.entries import Entry, Group, entries_in, having
from shardmark.results.schema import RankRecord

_STATE = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer state": "optimizer_state_bytes",
}
_OTHER = "activations and other"


def memory_figures(groups: Sequence[Group]) -> list[Figure]:
    """One stacked bar a row, and one for its servers where there are some."""
    bars = {entry: held for entry in entries_in(groups) if (held := _bars(entry))}
    peaks = [sum(parts.values()) for held in bars.values() for *_, parts in held]
    unit, size = byte_unit(max(peaks, default=0.0))
    return figure(
        "memory",
        "Peak memory by kind",
        [
            stacked_panel(
                group.title,
                f"Peak memory ({unit})",
                unit,
                [bar for entry in group.entries for bar in bars[entry]],
                size,
            )
            for group in having(groups, bars.__contains__)
        ],
        "The most that tensors held at once on the fullest rank, mean over the repeats."
        " Activations and other: the peak without parameters, gradients and optimizer state, which"
        " are counted in an untimed step.",
    )


def _bars(entry: Entry) -> list[tuple[str, int, Mapping[str, float]]]:
    """Name, row and bytes by kind: of the fullest worker, and of the fullest server."""
    bars: list[tuple[str, int, Mapping[str, float]]] = []
    for role in ("worker", "server"):
        fullest = []
        for trial in entry.row.ok_trials:
            ranks = [rank for rank in trial.ranks if rank.role == role and rank.lost is None]
            if ranks:
                fullest.append(max(ranks, key=lambda rank: _peak_bytes(rank) or 0))
        if parts := _parts(fullest):
            name = entry.bar if role == "worker" else f"{entry.bar}: server"
            bars.append((name, entry.number, parts))
    return bars


def _parts(ranks: Sequence[RankRecord]) -> dict[str, float]:
    """Means; the other bytes only where the peak and all kinds are known."""
    probes = [rank.probe for rank in ranks if rank.probe is not None]
    parts = {}
    for kind, attribute in _STATE.items():
        known = [value for probe in probes if (value := getattr(probe, attribute)) is not None]
        if known:
            parts[kind] = fmean(known)
    peaks = [peak for rank in ranks if (peak := _peak_bytes(rank)) is not None]
    if peaks and len(parts) == len(_STATE):
        parts[_OTHER] = max(0.0, fmean(peaks) - sum(parts.values()))
    return parts


def _peak_bytes(rank: RankRecord) -> int | None:
    if rank.peak_memory_bytes is not None:
        return rank.peak_memory_bytes
    return None if rank.probe is None else rank.probe.peak_memory_bytes
