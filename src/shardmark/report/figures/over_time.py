"""Network, CPU and GPUs while one trial of each row trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardmark.analysis.trial.series import OverTime, Sampled, sampled
from shardmark.report.figures.entry_series import series_of
from shardmark.report.figures.figure import Figure, Panel
from shardmark.report.figures.grouping import MOST_ROWS_READ, Entry, Group, facets_of, in_parts
from shardmark.report.figures.sentences import entries_in, joined, references
from shardmark.report.figures.units import rate_unit

_READ = "The first repeat of each row, from the first step to the end of the last epoch."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quantity:
    attribute: str
    label: str
    unit: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Quantities that stand beside each other."""

    name: str
    title: str
    caption: str
    quantities: tuple[_Quantity, ...]


_DEVICE = _Kind(
    name="gpu",
    title="GPUs over time",
    caption="Busy: share of time in which some kernel ran, mean over the GPUs in use; power: their"
    " sum (NVML).",
    quantities=(
        _Quantity(attribute="gpu_percent", label="GPU busy (%)", unit="%"),
        _Quantity(attribute="power_watts", label="Power (W)", unit="W"),
    ),
)


def over_time_figures(groups: Sequence[Group]) -> list[Figure]:
    """From raw files: one repeat of a limited number of rows."""
    entries = entries_in(groups)
    read = {id(one): data for one in entries[:MOST_ROWS_READ] if (data := sampled(one.row))}
    rates = [y for one in read.values() for y in one.network_bytes_per_second.y]
    figures = [
        *_figures(groups, read, _system(max(rates, default=0.0))),
        *_figures(groups, read, _DEVICE),
    ]
    if len(entries) <= MOST_ROWS_READ:
        return figures
    limit = f"Of {len(entries)} rows the first {MOST_ROWS_READ} were read."
    return [replace(one, caption=joined(one.caption, limit)) for one in figures]


def _system(largest_bytes_per_second: float) -> _Kind:
    unit, size = rate_unit(largest_bytes_per_second)
    return _Kind(
        name="network-and-cpu",
        title="Network and CPU over time",
        caption="Network: sent over all interfaces of all nodes, loopback included. CPU: all"
        " ranks and their children, 100 % being one busy core.",
        quantities=(
            _Quantity(
                attribute="network_bytes_per_second",
                label=f"Network, sent ({unit})",
                unit=unit,
                scale=1 / size,
            ),
            _Quantity(attribute="cpu_percent", label="CPU (% of one core)", unit="%"),
        ),
    )


def _figures(groups: Sequence[Group], read: Mapping[int, Sampled], kind: _Kind) -> list[Figure]:
    def has(entry: Entry) -> bool:
        found = read.get(id(entry))
        return found is not None and any(_values(found, one).x for one in kind.quantities)

    kept = [
        replace(group, entries=tuple(entry for entry in group.entries if has(entry)))
        for group in groups
    ]
    figures = []
    for part in in_parts(facets_of([group for group in kept if group.entries])):
        panels = [
            panel
            for facet in part.groups
            for quantity in kind.quantities
            if (panel := _panel(facet, read, quantity)) is not None
        ]
        figures.append(
            Figure(
                name=f"{kind.name}{part.ending}",
                title=kind.title,
                caption=joined(_READ, kind.caption, references(part.groups), part.note),
                panels=tuple(panels),
                columns=len({panel.y_label for panel in panels}),
                shared_y=part.one_condition,
            )
        )
    return figures


def _panel(facet: Group, read: Mapping[int, Sampled], quantity: _Quantity) -> Panel | None:
    series = []
    for entry in facet.entries:
        found = _values(read[id(entry)], quantity)
        if found.x:
            scaled = [value * quantity.scale for value in found.y]
            series.append(series_of(entry, found.x, scaled))
    if not series:
        return None
    return Panel(
        title=facet.title,
        kind="line",
        x_label="Time since the first step (s)",
        y_label=quantity.label,
        x_unit="s",
        y_unit=quantity.unit,
        series=tuple(series),
        marked=False,
        x_from_zero=True,
    )


def _values(found: Sampled, quantity: _Quantity) -> OverTime:
    values = getattr(found, quantity.attribute)
    assert isinstance(values, OverTime)
    return values
