"""Why something takes longer: which recorded span, wait or lack of cores makes the difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardmark.analysis.candidates import Field
from shardmark.analysis.comparison import DEFAULT_BASELINE, ratio_between
from shardmark.analysis.rows import Row
from shardmark.analysis.selection import is_shown
from shardmark.analysis.statistics import Estimate
from shardmark.analysis.step_time import (
    CpuUse,
    StepTime,
    common_repeats,
    cpu_use,
    samples_per_step,
    step_time,
)
from shardmark.analysis.surprise import NOTEWORTHY, Explanation, Kind, parts_of

DATA = "waiting for data"
EXPOSED = "exposed communication"
OPTIMIZER = "the optimizer"
COMPUTATION = "computation"
SLOW_STEPS = "steps slower than the median"


def time_explanations(field: Field) -> list[Explanation]:
    """More ranks that are slower than fewer, and strategies slower than the fastest of a size."""
    rows = [row for row in (*field.candidates, *field.weaker) if _rate(row) is not None]
    found: list[Explanation] = []
    for kind, row, other in _pairs(rows, field.candidates):
        ratio = ratio_between(other, row, "samples_per_second")
        if ratio is not None and surprising(ratio):
            found.append(_explain(kind, row, other, ratio))
    return found


def surprising(ratio: Estimate) -> bool:
    """Large enough, and shown; one repeat shows nothing, and is let pass to be called so."""
    return ratio.value > 1 + NOTEWORTHY and (ratio.n < 2 or is_shown(ratio))


def _pairs(rows: Sequence[Row], candidates: Sequence[Row]) -> Iterator[tuple[Kind, Row, Row]]:
    """The fastest of a size is one that keeps the whole promise."""
    for row in rows:
        fewer = _fewer_ranks(row, rows)
        if fewer is not None:
            yield "more ranks are slower", row, fewer
        same_size = [other for other in candidates if other.world_size == row.world_size]
        fastest = max(same_size, key=lambda other: _rate(other) or 0.0, default=row)
        if fastest is not row:
            yield "strategy is slower", row, fastest


def _fewer_ranks(row: Row, rows: Sequence[Row]) -> Row | None:
    """The same strategy on the next fewer ranks; else the baseline on one."""
    fewer = [other for other in rows if other.world_size < row.world_size]
    same = [other for other in fewer if other.label == row.label and not row.differing(other)]
    if same:
        return max(same, key=lambda other: other.world_size)
    alone = [one for one in fewer if one.strategy == DEFAULT_BASELINE and one.world_size == 1]
    return min(alone, key=lambda other: len(row.differing(other)), default=None)


def _rate(row: Row) -> float | None:
    estimate = row.metrics.get("samples_per_second")
    return None if estimate is None else estimate.value


def _explain(kind: Kind, row: Row, other: Row, ratio: Estimate) -> Explanation:
    samples = samples_per_step(other)
    repeats = common_repeats(row, other)
    times = [None if samples is None else step_time(one, samples, repeats) for one in (row, other)]
    shown = is_shown(ratio)
    own, base = times
    if own is None or base is None or samples is None or own.seconds <= base.seconds:
        return Explanation(
            kind=kind,
            row=row,
            other=other,
            metric="samples_per_second",
            size=ratio,
            shown=shown,
            unit="seconds",
            difference=0.0,
        )
    extra = own.seconds - base.seconds
    amounts = differences(own, base)
    cpu = [cpu_use(one, samples, repeats) for one in (row, other)]
    return Explanation(
        kind=kind,
        row=row,
        other=other,
        metric="samples_per_second",
        size=ratio,
        shown=shown,
        unit="seconds",
        difference=extra,
        parts=parts_of(amounts, extra),
        unexplained=extra - sum(amounts.values()),
        facts={
            "seconds": own.seconds,
            "other_seconds": base.seconds,
            "samples": samples,
            **_of_cores(cpu[0], cpu[1], extra),
        },
    )


def differences(own: StepTime, base: StepTime) -> dict[str, float]:
    """What each part adds; the parts add up to the extra time but for what no span holds.

    Exposed communication lies within forward, backward and optimizer, so it is taken out of them.
    Which of the three held it is not recorded: the optimizer counts only with that growth which the
    growth of the communication cannot be.
    """
    exposed = 0.0
    if own.exposed is not None and base.exposed is not None:
        exposed = own.exposed - base.exposed
    optimizer = max(0.0, own.optimizer - base.optimizer - max(0.0, exposed))
    amounts = {
        DATA: own.data - base.data,
        EXPOSED: exposed,
        OPTIMIZER: optimizer,
        COMPUTATION: own.work - base.work - exposed - optimizer,
        SLOW_STEPS: own.seconds - own.median_seconds - (base.seconds - base.median_seconds),
    }
    if own.exposed is None or base.exposed is None:
        del amounts[EXPOSED]
    return amounts


def _of_cores(own: CpuUse | None, base: CpuUse | None, extra: float) -> dict[str, float]:
    """What the cores say of the extra time: another view of it, not a further part.

    `work`: the cores' least time for the CPU time of all processes grew by this much.  `sharing`,
    where threads outnumber cores: so much a core for each thread could have saved at most.
    """
    if own is None or base is None:
        return {}
    work = min(max(0.0, own.floor_seconds - base.floor_seconds), extra)
    facts = {
        "cores": own.cores,
        "processes": float(own.processes),
        "threads": float(own.threads),
        "other_threads": float(base.threads),
        "busy_seconds": own.busy_seconds,
        "other_busy_seconds": base.busy_seconds,
        "floor_seconds": own.floor_seconds,
        "other_floor_seconds": base.floor_seconds,
        "work_seconds": work,
        "work_share": work / extra,
    }
    if own.threads > own.cores:
        saved = min(max(0.0, own.sharing_seconds - base.sharing_seconds), extra)
        facts |= {"sharing_seconds": saved, "sharing_share": saved / extra}
    return facts
