"""A competition between results: the best one, and the rivals that may be as good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from shardmark.base.text import listed

Question = Literal["fastest", "memory", "cost"]
Reason = Literal["shown", "alone", "tie", "not distinguishable", "not shown", "disturbed"]
Result = TypeVar("Result")
TITLES = {"fastest": "Fastest", "memory": "Least memory", "cost": "Cheapest"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking(Generic[Result]):
    """Results that compete for the answer to a question."""

    question: Question
    row: Result
    """The best result, which is the winner only if the question is decided."""
    rivals: tuple[Result, ...]
    """The other results, the next best first."""
    close: tuple[Result, ...]
    """Rivals that may be as good as the best result, the better ones first."""
    reason: Reason
    """`shown`: better than every rival that can be judged.  `alone`: there is no rival.
    `tie`: the close rivals differ little.  `not distinguishable`: their differences are noise.
    `not shown`: repeats are too few for any test.
    `disturbed`: other work disturbed the times of a result, and nothing is decided."""

    @property
    def decided(self) -> bool:
        return self.reason in ("shown", "alone")

    def text(
        self, best: str, figure: str, close: Sequence[str], *, in_sentences: bool = False
    ) -> str:
        """Write the best result with its figure, and the close rivals.

        The short form is `ddp or fsdp (tie), 240 samples/s`.  In sentences, it is `Fastest: ddp,
        240 samples/s. Too close to tell from fsdp.`
        """
        if in_sentences:
            text = f"{TITLES[self.question]}: {best}, {figure}."
            return f"{text} Too close to tell from {listed(close)}." if close else text
        names = f"{listed([best, *close], 'or')} ({self.reason})" if close else best
        return f"{names}, {figure}"
