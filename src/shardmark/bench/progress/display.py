"""Draws the current trial at the foot of a terminal or in a notebook's cell."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

from shardmark.base.text import one_line
from shardmark.bench.launch.listener import ProgressListener, TrialProgress
from shardmark.bench.launch.run_options import RunOptions
from shardmark.bench.progress.lines import Lines, Quiet, figures
from shardmark.ranks.trial import Trial

DRAW_EVERY_SECONDS = 0.5
"""Time between two drawings, each of which takes 0.3 ms of a core that a rank may use."""
BAR_COLUMNS = 60


class Display(Lines):
    """Draws the current trial in one place, and prints a line for each finished one."""

    def __init__(
        self,
        console: Console,
        draw: Callable[[RenderableType], object],
        folder: Path | None,
        budget_seconds: float | None = None,
    ) -> None:
        super().__init__(folder, budget_seconds=budget_seconds)
        self._console = console
        self._draw_now = draw
        self._drawn_at = float("-inf")

    def doing(self, text: str) -> None:
        self._draw(text)

    def trial_started(self, number: int, total: int | None, trial: Trial) -> None:
        super().trial_started(number, total, trial)
        self._draw(self._title, ("starting",), done=0.0)

    def show(self, progress: TrialProgress) -> None:
        if time.monotonic() - self._drawn_at >= DRAW_EVERY_SECONDS:
            done = progress.steps / progress.total_steps if progress.total_steps else None
            self._draw(self._title, figures(progress, self._pace), done=done)

    def _draw(self, heading: str, parts: Sequence[str] = (), *, done: float | None = None) -> None:
        """Draw the heading, the fraction `done` as a bar, and the parts."""
        self._drawn_at = time.monotonic()
        # Cut at the terminal's edge: a wrapped line could not be overwritten.
        lines: list[RenderableType] = [_line(one_line(heading), style="bold")]
        if done is not None:
            width = min(self._console.width, BAR_COLUMNS)
            bar = ProgressBar(total=1.0, completed=done, width=width)
            lines.append(Padding(bar, 0))  # ends its line, which a bar alone does not
        lines.append(Columns(map(_line, parts), padding=(0, 2)))
        self._draw_now(Padding(Group(*lines), 0))  # a notebook shows no bare group

    def _print(self, text: str) -> None:
        if self._console.is_jupyter:
            super()._print(text)  # below the cell's drawing, as plain text
        else:
            self._console.print(Text(one_line(text)), soft_wrap=True)


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


@contextmanager
def listener(
    folder: Path | None = None, options: RunOptions | None = None
) -> Iterator[ProgressListener]:
    """Yield the listener that fits standard output, for a run in the folder.

    It prints lines where nothing can be drawn: in a pipe, or on a terminal without cursor control.
    """
    console, options = Console(), options or RunOptions()
    budget_seconds = options.budget_seconds
    if options.quiet:
        yield Quiet()
    elif console.is_jupyter:
        from IPython.display import display

        cell = display(Text(""), display_id=True)
        yield Display(console, cell.update, folder, budget_seconds)
        cell.update(Text(""))
    # rich alone would take a pipe for a terminal with FORCE_COLOR, and fill it with codes.
    elif not sys.stdout.isatty() or console.is_dumb_terminal or not console.is_terminal:
        yield Lines(folder, budget_seconds=budget_seconds)
    else:
        # No refresh thread: it would draw more often than the progress changes.
        with Live(console=console, auto_refresh=False, transient=True) as live:
            update = partial(live.update, refresh=True)
            yield Display(console, update, folder, budget_seconds)
