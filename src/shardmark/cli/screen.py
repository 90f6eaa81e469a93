"""The foot of a terminal, drawn anew while a run works."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

from shardmark.cli.progress import Lines, figures
from shardmark.launch.listener import Reading
from shardmark.report.table.table import clean
from shardmark.trials.trial import Trial

DRAW_EVERY_SECONDS = 0.5
"""Drawing takes a third of a millisecond of a core that may be a rank's."""
BAR_COLUMNS = 60


class Display(Lines):
    """What is under way is drawn at the foot of the terminal; what has ended stays above it."""

    def __init__(self, live: Live, folder: Path | None = None) -> None:
        super().__init__(folder)
        self._live = live
        self._drawn_at = float("-inf")

    def doing(self, text: str) -> None:
        self._draw(text)

    def trial_started(self, number: int, total: int, trial: Trial) -> None:
        super().trial_started(number, total, trial)
        self._draw(self._title, ("starting",), done=0.0)

    def _show(self, reading: Reading) -> None:
        if time.monotonic() - self._drawn_at >= DRAW_EVERY_SECONDS:
            done = reading.steps / max(1, reading.total_steps)
            self._draw(self._title, figures(reading, self._pace), done=done)

    def _draw(self, heading: str, parts: Sequence[str] = (), *, done: float | None = None) -> None:
        """The heading, what is done of 1 as a bar, and the parts, in as many lines as needed."""
        self._drawn_at = time.monotonic()
        # Cut at the terminal's edge, since a wrapped line could not be drawn over.
        lines: list[RenderableType] = [_line(clean(heading), style="bold")]
        if done is not None:
            width = min(self._live.console.width, BAR_COLUMNS)
            bar = ProgressBar(total=1.0, completed=done, width=width)
            lines.append(Padding(bar, 0))  # which ends its line; a bar alone does not
        lines.append(Columns(map(_line, parts), padding=(0, 2)))
        self._live.update(Group(*lines), refresh=True)

    def _print(self, text: str) -> None:
        self._live.console.print(Text(clean(text)), soft_wrap=True)


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


@contextmanager
def display(folder: Path | None) -> Iterator[Lines]:
    """Standard output's; lines where the terminal cannot move its cursor."""
    console = Console()
    if console.is_dumb_terminal or not console.is_terminal:
        yield Lines(folder)
        return
    # No thread of its own: it would draw more often than there is anything new to tell.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield Display(live, folder)
