"""What one parameter server counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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

    def as_json(self) -> dict[str, Any]:
        """All counts, for a checkpoint."""
        return {
            "updates": self.updates,
            "pushes": self.pushes,
            "pulls": self.pulls,
            "staleness": sorted(self.staleness.items()),
            "sent_bytes": dict(self.sent_bytes),
            "received_bytes": dict(self.received_bytes),
        }

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        self.updates, self.pushes, self.pulls = kept["updates"], kept["pushes"], kept["pulls"]
        self.staleness.update(dict(kept["staleness"]))
        self.sent_bytes.update(kept["sent_bytes"])
        self.received_bytes.update(kept["received_bytes"])

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
