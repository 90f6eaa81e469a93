"""Why something takes longer: which recorded span, wait or lack of cores makes the difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardmark.analysis.advise.candidates import Field
from shardmark.analysis.advise.selection import select
from shardmark.analysis.compare.comparison import DEFAULT_BASELINE, ratio_between
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.diagnose.surprise import NOTEWORTHY, Explanation, Kind, parts_of
from shardmark.analysis.statistics.effects import between_all, holm
from shardmark.analysis.statistics.intervals import Estimate
from shardmark.analysis.statistics.verdicts import METRIC, is_different, verdict_between
from shardmark.analysis.trial.step_time import (
    CpuUse,
    StepTime,
    common_repeats,
    cpu_use,
    samples_per_step,
    step_time,
)

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
    """Large enough; one repeat shows nothing, and is let pass to be called so."""
    return ratio.value > 1 + NOTEWORTHY and (ratio.n < 2 or ratio.low is not None)


def _pairs(rows: Sequence[Row], candidates: Sequence[Row]) -> Iterator[tuple[Kind, Row, Row]]:
    """Rows that are slower, and than which; not those of which the repeats do not show it.

    The fastest of a size is one that keeps the whole promise.
    """
    looked_at: list[tuple[Kind, Row, Row]] = []
    family = []
    measured = [row for row in candidates if _rate(row) is not None]
    for row in rows:
        fewer = _fewer_ranks(row, rows)
        if fewer is not None:
            looked_at.append(("more ranks are slower", row, fewer))
            family.append((row, fewer))
        same_size = [other for other in measured if other.world_size == row.world_size]
        fastest = max(same_size, key=lambda other: _rate(other) or 0.0, default=row)
        if fastest is not row:
            looked_at.append(("strategy is slower", row, fastest))
        family += [(row, other) for other in same_size if other is not row]
    slower = _slower(rows, family)
    for kind, row, other in looked_at:
        if slower.get((id(row), id(other)), True) and not _ties(row, other, candidates):
            yield kind, row, other


def _slower(rows: Sequence[Row], family: Sequence[tuple[Row, Row]]) -> dict[tuple[int, int], bool]:
    """By the ids of two rows, whether the first is shown to be slower; for pairs with an interval.

    All pairs that were looked at are one family, also those among which the fastest was chosen.
    Where one of the two is the other's baseline, the verdict is the answer.
    """
    places = {id(row): place for place, row in enumerate(rows)}
    effects = between_all([row.values.get(METRIC, {}) for row in rows])
    pairs = {tuple(sorted((places[id(row)], places[id(other)]))) for row, other in family}
    judged = [pair for pair in effects if pair in pairs]
    corrected = dict(zip(judged, holm([effects[pair] for pair in judged]), strict=True))
    found = {}
    for pair, effect in corrected.items():
        for one, other in (pair, pair[::-1]):
            row, faster = rows[one], rows[other]
            verdict = verdict_between(row, faster) or verdict_between(faster, row)
            behind = effect.ratio.value < 1 if one < other else effect.ratio.value > 1
            found[id(row), id(faster)] = behind and is_different(verdict or effect)
    return found


def _ties(row: Row, other: Row, candidates: Sequence[Row]) -> bool:
    """Whether the recommendation for so many ranks says that the two may be as fast."""
    same_size = [one for one in candidates if one.world_size == row.world_size]
    if not any(one is row for one in same_size):
        return False
    found = select(
        same_size,
        lambda one: one.values.get(METRIC, {}),
        lambda one, than: ratio_between(one, than, METRIC),
        lower_is_better=False,
    )
    return found is not None and found.best is other and found.state_of(row) == "tie"


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
    if kind == "more ranks are slower" and row.label != other.label:
        kind = "slower than single"
    samples = samples_per_step(other)
    repeats = common_repeats(row, other)
    times = [None if samples is None else step_time(one, samples, repeats) for one in (row, other)]
    shown = ratio.low is not None
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
