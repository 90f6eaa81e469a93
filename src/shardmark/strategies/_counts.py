"""What one parameter server counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from shardmark.results.schema import ExchangeRecord


@dataclass(slots=True)
class Counts:
    """Changed by one thread at a time, or under a key of its own."""

    updates: int = 0
    pushes: int = 0
    pulls: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """Updates between a gradient's parameters and its use -> how many gradients."""
    sent_bytes: Counter[str] = field(default_factory=Counter)
    """By the worker's rank."""
    received_bytes: Counter[str] = field(default_factory=Counter)

    def record(self, *, wait_seconds: float, lost_samples: int) -> ExchangeRecord:
        """As of now."""
        return ExchangeRecord(
            pushes=self.pushes,
            pulls=self.pulls,
            sent_bytes=dict(self.sent_bytes),
            received_bytes=dict(self.received_bytes),
            updates=self.updates,
            staleness={str(steps): count for steps, count in sorted(self.staleness.items())},
            wait_seconds=wait_seconds,
            lost_samples=lost_samples,
        )
