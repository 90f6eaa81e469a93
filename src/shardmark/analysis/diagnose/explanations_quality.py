"""Why equivalent rows end with another quality, and what staleness has to do with a worse one."""

from __future__ import annotations

from shardmark.analysis.advise.candidates import Field, headline_qualities
from shardmark.analysis.compare.comparison import difference_between
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.diagnose.surprise import NOTEWORTHY, Explanation, Kind
from shardmark.analysis.statistics.intervals import Estimate
from shardmark.analysis.statistics.sampling import beyond_sampling, seeds_of
from shardmark.analysis.trial.step_time import samples_per_step
from shardmark.core.metrics import METRICS
from shardmark.results.verification import read_verification
from shardmark.trials.trial import cell_id

RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers that only a normalisation over the batch keeps."""


def quality_explanations(field: Field) -> list[Explanation]:
    """Differences at the end of the training that the repeats agree on.

    Repeats of one seed share its luck: they show what the machine does, and no difference of the
    strategies, so that such an explanation is marked as not shown.
    """
    quality = next(iter(headline_qualities(field.rows)), None)
    rows = [row for row in field.candidates if quality and row.values.get(quality)]
    if quality is None or not rows:
        return []
    return [*_equivalent(rows, quality), *_stale(field, rows, quality)]


def _equivalent(rows: list[Row], quality: str) -> list[Explanation]:
    """Each against the row on the fewest ranks, which shares the batch least."""
    first = min(rows, key=lambda row: row.world_size)
    found = []
    for row in rows:
        difference = difference_between(row, first, quality)
        if row is first or not _differs(difference, row, first, quality):
            continue
        samples = {id(one): _samples_per_normalisation(one) for one in (row, first)}
        own, base = samples[id(row)], samples[id(first)]
        facts: dict[str, float] = {}
        if own is not None and base is not None and own != base:
            facts = {"samples": own, "other_samples": base}
        assert difference is not None, "it is shown"
        found.append(_explanation("quality differs", (row, first), quality, difference, facts))
    return found


def _stale(field: Field, rows: list[Row], quality: str) -> list[Explanation]:
    """Worse than an equivalent row on as many ranks, with gradients older than their parameters."""
    found = []
    sign = 1 if METRICS[quality].better == "higher" else -1
    for row in field.weaker:
        mean, most = (row.metrics.get(f"staleness_{which}") for which in ("mean", "max"))
        same = [one for one in rows if one.world_size == row.world_size]
        if mean is None or most is None or mean.value <= 0 or not same:
            continue
        difference = difference_between(row, same[0], quality)
        if difference is None or sign * difference.value >= 0:
            continue
        if not _differs(difference, row, same[0], quality):
            continue
        facts = {"staleness_mean": mean.value, "staleness_max": most.value}
        one = _explanation("gradients are stale", (row, same[0]), quality, difference, facts)
        found.append(one)
    return found


def _explanation(
    kind: Kind, rows: tuple[Row, Row], quality: str, difference: Estimate, facts: dict[str, float]
) -> Explanation:
    row, other = rows
    seeds = min(seeds_of(row), seeds_of(other))
    return Explanation(
        kind=kind,
        row=row,
        other=other,
        metric=quality,
        size=difference,
        shown=seeds > 1,
        unit="metric",
        difference=difference.value,
        facts={**facts, "seeds": float(seeds)},
    )


def _differs(difference: Estimate | None, row: Row, other: Row, quality: str) -> bool:
    """Whether the interval leaves out zero, and other pictures would show the same.

    One repeat shows nothing.  Repeats judge the same validation samples: an accuracy of few of them
    is uncertain by itself, whatever the repeats agree on.  Another quality must differ by 5 %.
    """
    if difference is None or difference.low is None or difference.high is None:
        return False
    if not (difference.low > 0 or difference.high < 0):
        return False
    if quality.startswith("accuracy"):
        return beyond_sampling(row, other, quality, difference.value)
    base = other.metrics[quality]
    return base is not None and abs(difference.value) > NOTEWORTHY * abs(base.value)


def _samples_per_normalisation(row: Row) -> float | None:
    """Samples over which BatchNorm averages; None unless the verification met its buffers."""
    known = None if row.folder is None else read_verification(row.folder)
    verdict = None if known is None else known.of(cell_id(row.trials[0].trial))
    samples = samples_per_step(row)
    checks = () if verdict is None else verdict.checks
    where = " ".join(check.where or "" for check in checks if check.name == "buffers")
    shares = any("batch_norm" in rank.settings for rank in row.ok_trials[0].ranks)
    if samples is None or not shares or not any(one in where for one in RUNNING_STATISTICS):
        return None
    accumulated = row.trials[0].trial.get("recipe", {}).get("gradient_accumulation") or 1
    return samples / row.world_size / accumulated
