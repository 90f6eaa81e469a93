"""Lost nodes that come back while a trial runs: waited for, and given their part again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shardmark.launch.engine import Task
from shardmark.launch.nodes.roster import Roster
from shardmark.launch.outcome import LostNode
from shardmark.results.schema import RestartRecord
from shardmark.trials.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """A node that was lost, and that another process has taken the place of."""

    lost: LostNode
    noticed_at_seconds: float
    """Unix time of the loss."""


class Returns:
    """`again` has a node that came back take up the trial; `seconds` is how long one is awaited."""

    def __init__(
        self,
        roster: Roster,
        numbers: Iterable[int],
        *,
        seconds: float,
        again: Callable[[int], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._roster = roster
        self._known = {number: roster.member(number) for number in numbers}
        self._seconds = seconds
        self._again = again
        self._clock = clock
        self._missing: dict[int, tuple[float, LostNode]] = {}
        self.returned: list[Return] = []

    def look(self, numbers: Iterable[int]) -> LostNode | None:
        """A node that is lost for good, if any is."""
        for number in numbers:
            member = self._roster.member(number)
            before = self._known[number]
            if before.lost is not None and number not in self._missing:
                lost = LostNode(node=number, host=before.host, reason=before.lost)
                self._missing[number] = self._clock(), lost
            if number in self._missing and member is not before and member.lost is None:
                at_seconds, lost = self._missing.pop(number)
                self._known[number] = member
                self.returned.append(Return(lost=lost, noticed_at_seconds=at_seconds))
                self._again(number)
            elif number in self._missing:
                at_seconds, lost = self._missing[number]
                if self._clock() - at_seconds >= self._seconds:
                    return lost
        return None


def patience_seconds(trial: Trial | None, task: Task) -> float:
    """How long a lost node is awaited."""
    if trial is None or task != "measure" or not trial.limits.max_restarts:
        return 0
    return trial.limits.node_return_seconds


def with_returns(
    restarts: Sequence[RestartRecord], returned: Sequence[Return]
) -> tuple[RestartRecord, ...]:
    """The restarts, those that followed the loss of a node with that for a reason.

    What other nodes' ranks met then, a closed connection, was no cause.
    """
    found = list(restarts)
    for one in returned:
        lost = one.lost
        reason = f"node {lost.node} ({lost.host}) was lost: {lost.reason}"
        at_seconds = one.noticed_at_seconds
        distances = [abs(known.at_seconds - at_seconds) for known in found]
        if distances:
            nearest = distances.index(min(distances))
            found[nearest] = found[nearest].model_copy(update={"reason": reason})
        else:
            found.append(RestartRecord(restart=1, at_seconds=at_seconds, reason=reason))
    return tuple(found)
