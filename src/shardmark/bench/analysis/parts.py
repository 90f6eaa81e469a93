"""The parts of a step, of a script that `why` explains and of a row of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardmark.base.statistics.intervals import Estimate

NAMES = {
    "input": "waiting for input", "communication": "communication that nothing hides",
    "own_collectives": "collectives beside those of the gradients",
    "late_rank": "waiting for a late rank", "evaluation": "evaluation between the steps",
    "checkpoint": "checkpoints", "logging": "prints and logging",
    "own_code": "the script's own code between the passes",
    "pipeline": "stages of a pipeline that wait between their passes",
    "slow_steps": "steps that take longer than the median", "update": "the optimizer's update",
    "computing": "computing",
}  # fmt: skip
NOTEWORTHY = 0.03
"""Share of a step from which a part is shown."""
LATE = 0.05
"""The same for a late rank: ranks that share cores differ by chance."""
FEW_ROUNDS = 2
"""Rounds up to which the first line says how many there were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a step that is not computing."""

    kind: str
    seconds: Estimate
    known_by: Literal["taken away", "watched", "measured"] = "taken away"
    """A step was measured without it; or its share of the looks at the main thread; or by marks."""
    rank: int | None = None
    """The rank at fault; None if all are alike."""
    place: str | None = None
    lateness: str | None = None
    """Cause of a rank's lateness: its `rows`, its `place` or its `own work`; None if not tried."""
    phase: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """A step, and the parts of it that are shown."""

    step: Estimate
    parts: tuple[Part, ...]
    """The largest first."""
    undecided: tuple[Part, ...]
    """Parts whose interval holds zero and twice a noteworthy time; noteworthy ones without one."""
    unknown: tuple[str, ...]
    """Kinds of parts that are not known; the rest may hold them."""
    update: Estimate | None
    """The optimizer's update, which is part of the rest; None if it is small or not known."""

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """Parts that the rest does not hold."""
        return self.parts

    @property
    def computing_seconds(self) -> float:
        """The rest of a step."""
        return self.step.value - sum(part.seconds.value for part in self.parts)


def shown_and_undecided(
    parts: Sequence[Part], step_seconds: float
) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Return the parts that are shown, and those that may be noteworthy, the largest first."""
    noteworthy = NOTEWORTHY * step_seconds
    parts = sorted(parts, key=lambda part: -part.seconds.value)
    least = {"late_rank": LATE * step_seconds}
    shown = (p for p in parts if is_above(p.seconds, least.get(p.kind, noteworthy)))
    undecided = (
        p
        for p in parts
        if not is_above(p.seconds, p.seconds.value)
        and (p.seconds.value if p.seconds.high is None else p.seconds.high / 2) >= noteworthy
    )
    return tuple(shown), tuple(undecided)


def is_above(seconds: Estimate, least: float) -> bool:
    """True if the interval excludes zero, and the value is at least so large."""
    return seconds.low is not None and seconds.low > 0 and seconds.value >= least
