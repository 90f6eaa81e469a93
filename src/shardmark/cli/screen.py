"""The foot of a terminal, drawn anew while a run works."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

DRAW_EVERY_SECONDS = 0.5
"""Drawing takes a third of a millisecond of a core that may be a rank's."""
BAR_COLUMNS = 60


class Screen:
    """A few lines that replace each other; none is ever wider than the terminal."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._drawn_at = float("-inf")

    @classmethod
    @contextmanager
    def on(cls, console: Console) -> Iterator[Self]:
        # No thread of its own: it would draw more often than there is anything new to tell.
        with Live(console=console, auto_refresh=False, transient=True) as live:
            yield cls(live)

    def is_due(self) -> bool:
        """Whether what is drawn is old enough to be replaced."""
        return time.monotonic() - self._drawn_at >= DRAW_EVERY_SECONDS

    def draw(self, heading: str, parts: Sequence[str] = (), *, done: float | None = None) -> None:
        """Show a heading, what is done of 1 as a bar, and the parts, in as many lines as needed."""
        self._drawn_at = time.monotonic()
        width = self._live.console.width
        lines: list[RenderableType] = [line(heading, style="bold")]
        if done is not None:
            bar = ProgressBar(total=1.0, completed=done, width=min(width, BAR_COLUMNS))
            lines.append(Padding(bar, 0))  # which ends its line; a bar alone does not
        lines += map(line, filled(parts, width))
        self._live.update(Group(*lines), refresh=True)

    def print(self, text: str) -> None:
        """A line that stays, above what is drawn."""
        self._live.console.print(Text(text), soft_wrap=True)


def line(text: str, style: str = "") -> Text:
    """Cut at the terminal's edge, since a wrapped line could not be drawn over."""
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def filled(parts: Sequence[str], columns: int) -> list[str]:
    """The parts, as many in a line as fit into it."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= columns:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


@contextmanager
def screen() -> Iterator[Screen | None]:
    """Standard output's; None where the terminal cannot move its cursor."""
    console = Console()
    if console.is_dumb_terminal or not console.is_terminal:
        yield None
        return
    with Screen.on(console) as found:
        yield found
