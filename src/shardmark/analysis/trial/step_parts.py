"""Where the time of a step goes, each second counted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from shardmark.analysis.compare.rows import Row
from shardmark.results.schema import TrialResult

SPANS = ("forward_seconds", "backward_seconds", "optimizer_seconds")
"""Those in which communication may run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Seconds of one step, mean over ranks and repeats; the parts add up to `total_seconds`."""

    data_seconds: float | None
    """None where the strategy marks no such span: its time is in the rest."""
    forward_seconds: float | None
    """Without exposed communication, as the next two."""
    backward_seconds: float | None
    optimizer_seconds: float | None
    exposed_communication_seconds: float | None
    """None where it is not known: it is then within the spans."""
    rest_seconds: float
    """What no span marks, for example a sleep of `slow_ranks`."""

    @property
    def total_seconds(self) -> float:
        """The median step, or the spans' sum where that is more."""
        parts = (
            self.data_seconds,
            self.forward_seconds,
            self.backward_seconds,
            self.optimizer_seconds,
            self.exposed_communication_seconds,
            self.rest_seconds,
        )
        return sum(part for part in parts if part is not None)


def step_parts(row: Row) -> StepParts | None:
    """The parts of the row's steps; None where no trial marked its steps.

    Each span is a rank's median over the measured steps; here the mean over ranks counts, not the
    maximum: maxima of different ranks do not add up to anybody's step.  Exposed communication lies
    within forward, backward and optimizer, and is known for the step as a whole alone.  It is taken
    out of the three in proportion to their lengths, at most all of them: it comes from a profiled
    step, which is slower than a measured one.  The rest is the step without the spans, at least 0:
    medians need not add up.
    """
    trials = row.ok_trials
    step = _mean(trials, "step_seconds")
    spans = {name: _mean(trials, name) for name in SPANS}
    known = sum(seconds for seconds in spans.values() if seconds is not None)
    if step is None or known <= 0:
        return None
    data = _mean(trials, "data_seconds")
    exposed = _mean(trials, "exposed_communication_seconds")
    taken = None if exposed is None else min(exposed, known)
    computing = 1 - (taken or 0.0) / known
    left = {
        name: None if seconds is None else seconds * computing for name, seconds in spans.items()
    }
    return StepParts(
        data_seconds=data,
        forward_seconds=left["forward_seconds"],
        backward_seconds=left["backward_seconds"],
        optimizer_seconds=left["optimizer_seconds"],
        exposed_communication_seconds=taken,
        rest_seconds=max(0.0, step - known - (data or 0.0)),
    )


def _mean(trials: Sequence[TrialResult], name: str) -> float | None:
    """Over the repeats that have it, of the mean over ranks."""
    found = [summary for trial in trials if (summary := trial.metrics.get(name)) is not None]
    if not found:
        return None
    return fmean(one.value if one.mean is None else one.mean for one in found)
