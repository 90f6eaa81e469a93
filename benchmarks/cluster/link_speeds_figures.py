"""Figures of strategies over links of several speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isinf

from benchmarks.cluster.link_speeds import Speed, labels_of
from benchmarks.cluster.speed import bits_per_second

from shardmark.report.figures.figure import Figure, Panel, Series, with_ranges

MEGABYTE = 1e6
REFERENCE = "ddp"
BEYOND = 10.0
"""Unlimited links are drawn at so many times the fastest limit."""


def figures_of(speeds: Sequence[Speed], stem: str) -> list[Figure]:
    """Step time over link speed, alone and over that of `ddp`; bytes by strategy."""
    x_of = _places(speeds)
    absolute = [_line(speeds, label, x_of, {}) for label in labels_of(speeds)]
    reference = {
        speed.name: speed.cells[REFERENCE].step.value
        for speed in speeds
        if REFERENCE in speed.cells
    }
    relative = [_line(speeds, label, x_of, reference) for label in labels_of(speeds)]
    panels = [_panel("Step time", "Step time (s)", "s", absolute, x_of)]
    if reference:
        title = f"Over that of {REFERENCE}"
        panels.append(_panel(title, f"Step time / {REFERENCE}'s", "", relative, x_of))
    step = Figure(
        name=stem,
        title="Step time over link speed",
        caption="Mean over the repeats with 95 % intervals, and the means over those of"
        f" {REFERENCE}. Unlimited links stand at the right end.",
        panels=tuple(panels),
        columns=2,
    )
    return [with_ranges(step), _bytes_figure(speeds, stem)]


def _places(speeds: Sequence[Speed]) -> dict[str, float]:
    limits = [one.gigabits_per_second for one in speeds if not isinf(one.gigabits_per_second)]
    beyond = BEYOND * max(limits, default=1.0)
    return {
        one.name: beyond if isinf(one.gigabits_per_second) else one.gigabits_per_second
        for one in speeds
    }


def _line(
    speeds: Sequence[Speed], label: str, x_of: Mapping[str, float], over: Mapping[str, float]
) -> Series:
    """Slow links first; without `over` in seconds, else as a share of it."""
    here = [
        one for one in reversed(speeds) if label in one.cells and (not over or one.name in over)
    ]
    steps = [(one.cells[label].step, over.get(one.name, 1.0)) for one in here]
    return Series(
        name=label,
        x=[x_of[one.name] for one in here],
        y=[step.value / base for step, base in steps],
        low=None if over else [step.low for step, _ in steps],
        high=None if over else [step.high for step, _ in steps],
        style=speeds[0].cells[label].row.strategy if label in speeds[0].cells else label,
    )


def _panel(
    title: str,
    y_label: str,
    y_unit: str,
    series: Sequence[Series],
    x_of: Mapping[str, float],
) -> Panel:
    names = {place: name for name, place in x_of.items()}
    labels = (
        name if bits_per_second(name) is None else f"{place:g}"
        for place, name in sorted(names.items())
    )
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
        x_ticks=tuple(sorted(names)),
        x_tick_labels=tuple(labels),
    )


def _bytes_figure(speeds: Sequence[Speed], stem: str) -> Figure:
    """At the fastest links: bytes hardly depend on the speed."""
    cells = {label: cell for label, cell in speeds[0].cells.items() if cell.interface_bytes}
    between = [(cells[label].between_nodes_bytes or 0.0) / MEGABYTE for label in cells]
    total = [c.interface_bytes.value / MEGABYTE for c in cells.values() if c.interface_bytes]
    inside = [max(0.0, whole - part) for whole, part in zip(total, between, strict=True)]
    panel = Panel(
        title="",
        kind="stacked_horizontal",
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
