"""What the controller knows of a trial under way on several nodes."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from shardmark.launch.nodes.channel import Message
from shardmark.launch.nodes.roster import Roster

PAUSE_SECONDS = 0.01


@dataclass(slots=True)
class Watch:
    """What is known of a trial under way."""

    numbers: Sequence[int]
    answers: dict[int, Message] = field(default_factory=dict)
    failed_at: float | None = None
    """On the monotonic clock: when the first node's ranks had failed."""

    @property
    def running(self) -> list[int]:
        return [number for number in self.numbers if number not in self.answers]

    def collect(self, roster: Roster, seconds: float) -> None:
        """Take the answers of nodes whose part has ended; waits so long if there is none."""
        deadline = time.monotonic() + seconds
        while self.running:
            for number in self.running:
                with suppress(queue.Empty):
                    self.answers[number] = roster.member(number).answers.get_nowait()
                    if self.answers[number].get("ended") != 0 and self.failed_at is None:
                        self.failed_at = time.monotonic()
            if time.monotonic() >= deadline:
                return
            time.sleep(PAUSE_SECONDS)
