"""Drawings on a real pseudo-terminal, and the text that reaches a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

from tests import ROOT
from tests.programs import output_of

DRAWING = str(Path(__file__).with_name("drawing.py"))
STYLES = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""Variables of the machine's that would change what is drawn."""
CONTROL = re.compile(r"\x1b\[\??[\d;]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[[\d;]*[349]\dm")
ERASE_LINE, SHOW_CURSOR, HIDE_CURSOR = "\x1b[2K", "\x1b[?25h", "\x1b[?25l"
ENDED = [
    "2 trials; loading libraries",
    "[1/2] ddp on 2 ranks, repeat 1 of 2: ok in 21.5 s, 80.0 samples/s, peak 291 MiB,"
    " about 40 s left",
    "[2/2] ddp on 2 ranks, repeat 2 of 2: failed after 21.5 s: rank 1: broken;"
    " mend it (trials/ddp-2-0)",
    "the table",
]
FIGURES = ("step 210 of 400", "80.0 samples/s", "loss 1.79", "about 59 s left")


def environment(variables: dict[str, str]) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in STYLES}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**kept, "TERM": "xterm-256color", "PYTHONPATH": path, **variables}


def on_terminal(*arguments: str, columns: int, **variables: str) -> str:
    """Raw output in front of a terminal of that width, which has its cursor back in the end."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, DRAWING, *arguments],
        stdin=side,
        stdout=side,
        stderr=side,
        env=environment(variables),
    )
    os.close(side)
    output = b""
    try:
        while chunk := os.read(main, 65536):
            output += chunk
    except OSError:
        pass  # how Linux says that nobody has the other side open any more
    finally:
        os.close(main)
    text = output.decode()
    assert process.wait(timeout=60) == 0, text
    assert text.rfind(SHOW_CURSOR) > text.rfind(HIDE_CURSOR) >= 0
    return text


def plain(output: str) -> list[str]:
    """Every line that was ever written, drawn or kept."""
    return [line.rstrip() for line in re.split(r"[\r\n]+", CONTROL.sub("", output))]


def test_trial_is_drawn_at_the_foot_and_gone_in_the_end() -> None:
    output = on_terminal(columns=150)
    lines = plain(output)
    at = next(number for number, line in enumerate(lines) if "step 210 of" in line)
    assert lines[at - 2] == "[1/2] ddp on 2 ranks, repeat 1 of 2"
    assert len(lines[at - 1]) == 60, "the bar"
    assert all(figure in lines[at] for figure in FIGURES)
    assert [line for line in lines if line in ENDED] == ENDED, "what has ended stays"
    assert plain(output.rpartition(ERASE_LINE)[2])[-2:] == [ENDED[-1], ""]
    assert COLOUR.search(output)


def test_narrow_terminal_gets_more_lines_and_wraps_none_of_them() -> None:
    output = on_terminal(columns=40, NO_COLOR="1")
    drawn = [line for line in plain(output) if line not in ENDED]
    assert all(any(figure in line for line in drawn) for figure in FIGURES)
    assert max(map(len, drawn)) <= 40
    assert not COLOUR.search(output)


def test_interrupt_gives_the_terminal_back() -> None:
    lines = plain(on_terminal("ctrl-c", columns=100))
    assert [line for line in lines if line in ENDED] == [ENDED[0], ENDED[-1]]


def test_pipe_gets_lines_without_control_characters_even_with_colours_forced() -> None:
    colours = environment({"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"})
    printed = output_of(sys.executable, DRAWING, stdin=subprocess.DEVNULL, env=colours)
    lines = printed.splitlines()
    assert all(line.isprintable() for line in lines)
    assert [line for line in lines if line in ENDED] == ENDED
    verifying, stepped = [line for line in lines if line not in ENDED]
    assert verifying == "verifying [1/1] ddp"
    assert "step 300 of 400, 80.0 samples/s, loss 1.7, 30 s elapsed" in stepped
