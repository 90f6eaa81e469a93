"""Where the time of a row's steps goes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean

from shardmark.analysis.compare.rows import Row
from shardmark.results.schema import TrialResult


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
    data: float | None
    """None where the strategy marks no such span, as the next three."""
    forward: float | None
    backward: float | None
    optimizer: float | None
    exposed: float | None
    """Communication that nothing hid, at most forward, backward and optimizer, which hold it."""

    @property
    def work(self) -> float:
        """Spans in which a rank computes or communicates."""
        return sum(span for span in (self.forward, self.backward, self.optimizer) if span)

    @property
    def complete(self) -> bool:
        """Whether every span is known."""
        return None not in (self.data, self.forward, self.backward, self.optimizer)

    def parts(self) -> dict[str, float | None]:
        """Each second counted once: exposed communication is taken out of the spans, in proportion.

        It comes from a profiled step and is known for the step as a whole alone.  The rest is what
        no span marks, for example a sleep of `slow_ranks`; at least 0, as medians need not add up.
        """
        computing = 1 - (self.exposed or 0.0) / self.work

        def without_exposed(span: float | None) -> float | None:
            return None if span is None else span * computing

        return {
            "data": self.data,
            "forward": without_exposed(self.forward),
            "backward": without_exposed(self.backward),
            "optimizer": without_exposed(self.optimizer),
            "exposed communication": self.exposed,
            "rest": max(0.0, self.median - self.work - (self.data or 0.0)),
        }


def samples_per_step(row: Row) -> float | None:
    """As the recipe declares them, all ranks together."""
    recipe = row.trials[0].trial.get("recipe", {})
    total, per_rank = recipe.get("global_batch"), recipe.get("per_rank_batch")
    if total is not None:
        return float(total)
    return None if per_rank is None else float(per_rank) * row.trials[0].layout.shares


def common_repeats(row: Row, other: Row) -> frozenset[int]:
    """Those of both, so that what disturbed both cancels; all where there is no common one."""
    own, others = ({trial.repeat for trial in r.ok_trials} for r in (row, other))
    return frozenset(own & others or own | others)


def step_time(
    row: Row, samples: float | None = None, repeats: Collection[int] | None = None
) -> StepTime | None:
    """The time of a step, or for so many samples; None where no trial marked its steps."""
    own = samples_per_step(row)
    trials = [t for t in row.ok_trials if repeats is None or t.repeat in repeats]
    if samples is not None and own is None:
        return None
    scale = 1.0 if samples is None or own is None else samples / own
    means = {
        span: None if (seconds := _mean(trials, f"{span}_seconds")) is None else scale * seconds
        for span in ("step", "data", "forward", "backward", "optimizer", "exposed_communication")
    }
    median, exposed = means["step"], means["exposed_communication"]
    work = sum(means[span] or 0.0 for span in ("forward", "backward", "optimizer"))
    if median is None or work <= 0:
        return None
    rates = [_rate(trial) for trial in trials]
    slowness = [1 / rate for rate in rates if rate is not None]
    return StepTime(
        median=median,
        at_rate=scale * own * fmean(slowness) if own and len(slowness) == len(trials) else None,
        data=means["data"],
        forward=means["forward"],
        backward=means["backward"],
        optimizer=means["optimizer"],
        exposed=None if exposed is None else min(exposed, work),
    )


def _mean(trials: Sequence[TrialResult], name: str) -> float | None:
    """Over the repeats that have it, of the mean over ranks."""
    summaries = [summary for trial in trials if (summary := trial.metrics.get(name)) is not None]
    if not summaries:
        return None
    return fmean(one.value if one.mean is None else one.mean for one in summaries)


def _rate(trial: TrialResult) -> float | None:
    """Samples a second."""
    rate = trial.metrics.get("samples_per_second")
    return rate.value if rate is not None and rate.value > 0 else None
