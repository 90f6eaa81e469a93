"""Breakdown of a row's step time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from shardmark.base.results.schema import TrialResult
from shardmark.bench.analysis.compare.rows import Row
from shardmark.bench.analysis.trial.rank_metrics import measured_steps

WORK = ("forward", "backward", "optimizer")
"""Spans in which a rank computes and communicates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step by span: means over ranks and repeats.

    A span is a rank's median over the measured steps.  Ranks are averaged, because maxima of
    different ranks do not add up to the step of any rank.
    """

    median: float
    """Median time of a step."""
    at_rate: float | None
    """Time of a step that follows from samples_per_second."""
    spans: Mapping[str, float | None]
    """Seconds of `data` and `WORK`; None for a span that the strategy does not have."""
    exposed: float | None
    """Communication that no computation hides, which is part of `WORK` and `between`."""
    between: float = 0.0
    """Time in which a pipeline stage waits between its passes."""

    @property
    def work(self) -> float:
        return sum(self.spans[name] or 0.0 for name in WORK)

    def parts(self) -> dict[str, float | None]:
        """Return disjoint parts of the step, with exposed communication subtracted from the spans.

        It is subtracted in proportion, because it is measured only for the full step.  The rest is
        time without a span, such as the delays of `slow_ranks`; medians need not add up, so the
        rest is at least 0.
        """
        data = self.spans["data"]
        waiting = min(self.exposed or 0.0, self.between)
        computing = 1 - ((self.exposed or 0.0) - waiting) / self.work
        spans = {name: self.spans[name] for name in WORK}
        return {
            "data": data,
            **{
                name: None if seconds is None else seconds * computing
                for name, seconds in spans.items()
            },
            "exposed communication": self.exposed,
            "rest": max(0.0, self.median - self.work - waiting - (data or 0.0)),
        }


def samples_per_step(row: Row) -> float | None:
    """Return the global batch of the recipe, or a script's mean number of samples; else None."""
    recipe = row.trials[0].trial.get("recipe", {})
    total, per_rank = recipe.get("global_batch"), recipe.get("per_rank_batch")
    if total is not None:
        return float(total)
    if per_rank is not None:
        return float(per_rank) * row.trials[0].layout.shares
    ranks = row.ok_trials[0].ranks if row.ok_trials else ()
    steps = max(map(measured_steps, ranks), default=0)
    return sum(rank.samples for rank in ranks) / steps or None if steps else None


def step_time(
    row: Row, samples: float | None = None, repeats: Collection[int] | None = None
) -> StepTime | None:
    """Return the time of a step, or of `samples` samples; None if no trial has spans."""
    batch = samples_per_step(row)
    trials = [t for t in row.ok_trials if repeats is None or t.repeat in repeats]
    if samples is not None and batch is None:
        return None
    scale = 1.0 if samples is None or batch is None else samples / batch
    median = _mean(trials, "step_seconds")
    exposed = _mean(trials, "exposed_communication_seconds")
    means = {name: _mean(trials, f"{name}_seconds") for name in ("data", *WORK)}
    work = sum(means[name] or 0.0 for name in WORK)
    if median is None or work <= 0:
        return None
    bubble = _mean(trials, "pipeline_bubble_fraction") or 0.0
    passes = (means["forward"] or 0.0) + (means["backward"] or 0.0)
    between = passes * bubble / (1 - bubble) if bubble < 1 else 0.0
    rates = [summary.value for t in trials if (summary := t.metrics.get("samples_per_second"))]
    has_rates = len(rates) == len(trials) and min(rates) > 0
    return StepTime(
        median=scale * median,
        at_rate=scale * batch * fmean(1 / rate for rate in rates) if batch and has_rates else None,
        spans={name: None if mean is None else scale * mean for name, mean in means.items()},
        exposed=None if exposed is None else scale * min(exposed, work + between),
        between=scale * between,
    )


def _mean(trials: Sequence[TrialResult], name: str) -> float | None:
    """Return the mean of a metric over ranks, and over the repeats that have it."""
    summaries = [summary for trial in trials if (summary := trial.metrics.get(name)) is not None]
    if not summaries:
        return None
    return fmean(summary.value if summary.mean is None else summary.mean for summary in summaries)
