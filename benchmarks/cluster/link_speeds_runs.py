"""The runs behind a table of link speeds: when, where, and how calm the machine was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isinf
from typing import TYPE_CHECKING, Any

from benchmarks import recording
from benchmarks.recording import Table

from shardmark.analysis.statistics.intervals import Estimate, estimate_ratio
from shardmark.results.schema import StabilityKind as Kind
from shardmark.results.store import RunFolder

if TYPE_CHECKING:
    from benchmarks.cluster.link_speeds import Speed

BITS = 8
CALM_NOTE = (
    "By the stability analysis of `compare`, the worst of each kind. Others: all CPU time that is"
    " not the ranks' own, other work of the kernel included. Load: means over 1, 5 and 15 minutes"
    " when the run began."
)
LOADED = (
    "**Other programs used the machine while these runs were measured. How much at each speed"
    " stands below: speeds differ in that load as well as in the links.** Within a speed, the"
    " strategies' trials took turns."
)


def environments(speeds: Sequence[Speed]) -> list[dict[str, Any]]:
    """Machine and versions of each run."""
    return [RunFolder(speed.run.path).read_environment() for speed in speeds]


def around(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Date, machine and versions of the first run; all commits and loads."""
    return recording.around(found[0]) | {
        "commits": [(one.get("git") or {}).get("commit") for one in found],
        "load_before": [one.get("load") for one in found],
    }


def runs_table(speeds: Sequence[Speed]) -> Table:
    """A line for each speed: when, how much of it, verified, load."""
    rows = [
        (
            speed.name,
            str(found.get("date", "-"))[:16].replace("T", " "),
            _trials(speed),
            _verified(speed),
            _load(found),
        )
        for speed, found in zip(speeds, environments(speeds), strict=True)
    ]
    columns = ("links", "began, UTC", "trials ok", "verified", "load before: 1, 5, 15 min")
    return Table(columns=columns, rows=tuple(rows))


def calm_table(speeds: Sequence[Speed]) -> Table:
    """A line for each speed and kind of disturbance, and for what was there when it began."""
    rows = []
    for speed in speeds:
        found = calm_of(speed)
        rows += [(speed.name, one["kind"], one["trials"], one["worst"]) for one in found]
        if not found:
            rows.append((speed.name, "nothing found", "-", "-"))
    columns = ("links", "not calm", "trials", "worst")
    return Table(columns=columns, rows=tuple(rows), notes=(CALM_NOTE,))


def calm_of(speed: Speed) -> list[dict[str, str]]:
    """`kind`, `trials` and `worst`; what is said of a whole run has `-` as its trials."""
    ids = {trial.id for trial in speed.run.trials}
    lines = []
    for kind in Kind:
        of_kind = [one for one in speed.warnings if one.kind is kind]
        of_trials = [one for one in of_kind if one.place in ids]
        of_run = [one for one in of_kind if one.place not in ids]
        lines += [{"kind": str(kind), "trials": "-", "worst": one.text} for one in of_run]
        if of_trials:
            share = f"{len({one.place for one in of_trials})} of {_ok(speed)}"
            lines.append({"kind": str(kind), "trials": share, "worst": of_trials[0].text})
    return lines


def load_lines(speeds: Sequence[Speed]) -> list[str]:
    """That the machine's load is in the numbers, and where it is all that can be in them."""
    disturbed = any(one.kind is Kind.OTHER_PROCESSES for speed in speeds for one in speed.warnings)
    lines = [LOADED] if disturbed else []
    free = next((speed for speed in speeds if isinf(speed.gigabits_per_second)), None)
    peak = None if free is None else free.peak_bytes_per_second
    if free is None or peak is None:
        return lines
    gigabits = peak * BITS / 1e9
    for speed in speeds:
        ratio = over_all(speed, free)
        if speed is free or speed.gigabits_per_second <= gigabits or ratio is None:
            continue
        lines.append(
            f"The limit of {speed.name} lies above the most that a link carried between two"
            f" samplings without a limit, {gigabits:.2g} Gbit/s: it can hold up nothing but bursts"
            f" shorter than that.{_slower(speed, free, ratio)}"
        )
    return lines


def over_all(speed: Speed, other: Speed) -> Estimate | None:
    """Step time over that at the other speed, mean over the strategies that both have."""
    names = [name for name in speed.cells if name in other.cells]
    if len(names) < 2:
        return None
    above, below = ([one.cells[name].step.value for name in names] for one in (speed, other))
    return estimate_ratio(above, below)


def _slower(speed: Speed, free: Speed, ratio: Estimate) -> str:
    beyond = [
        name
        for name, cell in speed.cells.items()
        if name in free.cells and _above(cell.step, free.cells[name].step)
    ]
    if not beyond and (ratio.low is None or ratio.low <= 1):
        return ""
    each = f"; beyond both intervals: {', '.join(beyond)}" if beyond else ""
    return (
        f" Yet steps took {ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) times as long as"
        f" at {free.name}, mean over the strategies{each}. The limit does not explain"
        " that: the machine's load differed, and a token bucket costs CPU time itself."
    )


def _above(one: Estimate, other: Estimate) -> bool:
    return one.low is not None and other.high is not None and one.low > other.high


def _ok(speed: Speed) -> int:
    return sum(len(cell.row.ok_trials) for cell in speed.cells.values())


def _trials(speed: Speed) -> str:
    planned = len(speed.run.trials) if speed.planned is None else speed.planned
    return f"{_ok(speed)} of {planned}"


def _verified(speed: Speed) -> str:
    if speed.run.verification is None:
        return "no"
    rows = [cell.row for cell in speed.cells.values()]
    alike = sum(row.equivalent is True for row in rows)
    by_design = sum(row.guarantee is not None and row.equivalent is not True for row in rows)
    rest = f", {by_design} differ by design" if by_design else ""
    return f"yes: {alike} of {len(rows)} equivalent{rest}"


def _load(found: Mapping[str, Any]) -> str:
    averages = (found.get("load") or {}).get("average")
    return ", ".join(f"{one:.1f}" for one in averages) if averages else "not recorded"
