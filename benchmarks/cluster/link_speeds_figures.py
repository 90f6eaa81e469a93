"""Figures of strategies over links of several speeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isinf

from benchmarks.cluster.link_speeds import Cell, Speed, group_of, labels_of
from benchmarks.cluster.speed import bits_per_second

from shardmark.analysis.statistics.intervals import Estimate, estimate_ratio
from shardmark.report.figures.chart import Figure, Panel, Series

MEGABYTE = 1e6
REFERENCE = "ddp"
BEYOND = 10.0
"""Unlimited links are drawn at so many times the fastest limit."""


def figures_of(speeds: Sequence[Speed], stem: str) -> list[Figure]:
    """Step time over link speed, alone and over that of `ddp`; bytes by strategy."""
    x_of = _places(speeds)
    labels = labels_of(speeds)
    absolute = [_line(speeds, label, x_of, lambda _, cell: cell.step) for label in labels]
    relative = [_line(speeds, label, x_of, _over_reference) for label in labels]
    panels = [_panel("Step time", "Step time (s)", "s", absolute, x_of)]
    if any(one.x for one in relative):
        title = f"Over that of {REFERENCE}"
        panels.append(_panel(title, f"Step time / {REFERENCE}'s", "", relative, x_of))
    step = Figure(
        name=stem,
        title="Step time over link speed",
        caption="Mean over the repeats, and the ratio to"
        f" {REFERENCE} in the same repeat, with 95 % intervals. Unlimited links stand at the right"
        " end.",
        panels=tuple(panels),
    )
    return [step, _bytes_figure(speeds, stem)]


def _places(speeds: Sequence[Speed]) -> dict[str, float]:
    limits = [one.gigabits_per_second for one in speeds if not isinf(one.gigabits_per_second)]
    beyond = BEYOND * max(limits, default=1.0)
    return {
        one.name: beyond if isinf(one.gigabits_per_second) else one.gigabits_per_second
        for one in speeds
    }


def _over_reference(speed: Speed, cell: Cell) -> Estimate | None:
    """From the pairs of the same repeat, which whatever holds up a whole repeat leaves alone."""
    alike = [
        one
        for one in speed.cells.values()
        if one.row.label == REFERENCE
        and group_of(one.row) == group_of(cell.row)
        and one.row.nodes == cell.row.nodes
    ]
    if len(alike) != 1:
        return None
    base = alike[0].step_seconds
    repeats = sorted(base.keys() & cell.step_seconds.keys())
    if not repeats:
        return None
    return estimate_ratio([cell.step_seconds[n] for n in repeats], [base[n] for n in repeats])


def _line(
    speeds: Sequence[Speed],
    label: str,
    x_of: Mapping[str, float],
    value_of: Callable[[Speed, Cell], Estimate | None],
) -> Series:
    """Slow links first, where there is a value."""
    here = [
        (one.name, found)
        for one in reversed(speeds)
        if label in one.cells and (found := value_of(one, one.cells[label])) is not None
    ]
    alike = [cell.row for one in speeds for name, cell in one.cells.items() if name == label]
    variants = [
        name
        for name in labels_of(speeds)
        if any(
            name in one.cells and one.cells[name].row.strategy == alike[0].strategy
            for one in speeds
        )
    ]
    return Series(
        name=label,
        x=[x_of[name] for name, _ in here],
        y=[found.value for _, found in here],
        low=[found.low for _, found in here],
        high=[found.high for _, found in here],
        style=alike[0].strategy,
        variant=variants.index(label),
    )


def _panel(
    title: str,
    y_label: str,
    y_unit: str,
    series: Sequence[Series],
    x_of: Mapping[str, float],
) -> Panel:
    return Panel(
        title=title,
        kind="line",
        x_label="Link speed (Gbit/s)",
        y_label=y_label,
        x_unit="Gbit/s",
        y_unit=y_unit,
        series=tuple(one for one in series if one.x),
        x_logarithmic=True,
        y_logarithmic=True,
        x_ticks=tuple(sorted(at for name, at in x_of.items() if bits_per_second(name))),
    )


def _bytes_figure(speeds: Sequence[Speed], stem: str) -> Figure:
    """At the fastest links: bytes hardly depend on the speed."""
    cells = {label: cell for label, cell in speeds[0].cells.items() if cell.interface_bytes}
    between = [(cells[label].between_nodes_bytes or 0.0) / MEGABYTE for label in cells]
    total = [c.interface_bytes.value / MEGABYTE for c in cells.values() if c.interface_bytes]
    inside = [max(0.0, whole - part) for whole, part in zip(total, between, strict=True)]
    panel = Panel(
        title="",
        kind="stacked",
        x_label="",
        y_label="Sent per rank and step (MB)",
        y_unit="MB",
        series=(
            Series(name="between nodes", x=list(cells), y=between, style="interface 1"),
            Series(name="inside a node", x=list(cells), y=inside, style="interface 0"),
        ),
    )
    return Figure(
        name=f"{stem}-bytes",
        title="Bytes by strategy",
        caption="Sent over all interfaces for each training rank and step;"
        f" links: {speeds[0].name}.",
        panels=(panel,),
    )
