"""Where the time of a row's steps goes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from shardmark.analysis.compare.rows import Row
from shardmark.results.schema import TrialResult

WORK = ("forward", "backward", "optimizer")
"""Spans in which a rank computes or communicates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds for the samples of one step, or of another's: means over ranks and repeats.

    A span is a rank's median over the measured steps.  Of ranks the mean counts, not the maximum:
    maxima of different ranks do not add up to anybody's step.
    """

    median: float
    """Of the steps."""
    at_rate: float | None
    """As samples_per_second has it, so that it agrees with the headline."""
    spans: Mapping[str, float | None]
    """`data` and `WORK`; None where the strategy marks no such span."""
    exposed: float | None
    """Communication that nothing hid, at most the spans of `WORK` and what is between, which hold
    it."""
    between: float = 0.0
    """A pipeline's waiting between its passes."""

    @property
    def work(self) -> float:
        return sum(self.spans[name] or 0.0 for name in WORK)

    def parts(self) -> dict[str, float | None]:
        """Each second counted once: exposed communication is taken out of the spans, in proportion.

        It comes from a profiled step and is known for the step as a whole alone.  The rest is what
        no span marks, for example a sleep of `slow_ranks`; at least 0, as medians need not add up.
        """
        data = self.spans["data"]
        waiting = min(self.exposed or 0.0, self.between)
        computing = 1 - ((self.exposed or 0.0) - waiting) / self.work
        spans = {name: self.spans[name] for name in WORK}
        return {
            "data": data,
            **{name: None if s is None else s * computing for name, s in spans.items()},
            "exposed communication": self.exposed,
            "rest": max(0.0, self.median - self.work - waiting - (data or 0.0)),
        }


def samples_per_step(row: Row) -> float | None:
    """As the recipe declares them, all ranks together."""
    recipe = row.trials[0].trial.get("recipe", {})
    total, per_rank = recipe.get("global_batch"), recipe.get("per_rank_batch")
    if total is not None:
        return float(total)
    return None if per_rank is None else float(per_rank) * row.trials[0].layout.shares


def step_time(
    row: Row, samples: float | None = None, repeats: Collection[int] | None = None
) -> StepTime | None:
    """The time of a step, or for so many samples; None where no trial marked its steps."""
    own = samples_per_step(row)
    trials = [t for t in row.ok_trials if repeats is None or t.repeat in repeats]
    if samples is not None and own is None:
        return None
    scale = 1.0 if samples is None or own is None else samples / own
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
    known = own is not None and len(rates) == len(trials) and min(rates) > 0
    return StepTime(
        median=scale * median,
        at_rate=scale * own * fmean(1 / rate for rate in rates) if own and known else None,
        spans={name: None if mean is None else scale * mean for name, mean in means.items()},
        exposed=None if exposed is None else scale * min(exposed, work + between),
        between=scale * between,
    )


def _mean(trials: Sequence[TrialResult], name: str) -> float | None:
    """Over the repeats that have it, of the mean over ranks."""
    summaries = [summary for trial in trials if (summary := trial.metrics.get(name)) is not None]
    if not summaries:
        return None
    return fmean(each.value if each.mean is None else each.mean for each in summaries)
