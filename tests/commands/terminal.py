"""A terminal to look at: a pseudo-terminal for a program, and what its screen shows after it."""

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

CONTROL = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])")
CALM = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""Variables of the machine's that would change what is drawn."""


class Screen:
    """As much of a terminal as a progress display uses; what it does not know is an error."""

    def __init__(self, columns: int) -> None:
        self.lines: list[str] = [""]
        self.wrapped = 0
        self.cursor_shown = True
        self.colours: set[str] = set()
        self.frames: list[list[str]] = []
        """What was on the screen each time before something was erased."""
        self._columns = columns
        self._drawn = False
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        while text:
            control = CONTROL.match(text)
            if control:
                self._control(control[1], control[2], control[3])
                text = text[control.end() :]
            else:
                self._put(text[0])
                text = text[1:]

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._row += 1
            if self._row == len(self.lines):
                self.lines.append("")
        else:
            assert character.isprintable(), f"unknown control character {character!r}"
            if self._column == self._columns:
                self.wrapped += 1
                self._put("\r")
                self._put("\n")
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
            self._column += 1
            self._drawn = True

    def _control(self, private: str, numbers: str, letter: str) -> None:
        if letter == "m":
            self.colours |= {code for code in numbers.split(";") if re.fullmatch("[349]\\d", code)}
        elif letter == "A":
            self._row = max(0, self._row - int(numbers or 1))
        elif letter == "K" and numbers == "2":
            if self._drawn:
                self.frames.append([line.rstrip() for line in self.lines])
                self._drawn = False
            self.lines[self._row] = ""
        elif private and numbers == "25":
            self.cursor_shown = letter == "h"
        else:
            raise AssertionError(f"unknown control sequence {private}{numbers}{letter}")

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")


def resize(descriptor: int, columns: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def on_terminal(*command: str, columns: int = 100, **variables: str) -> tuple[int, str]:
    """Exit code and raw output of a Python script in front of a terminal of that width."""
    main, side = pty.openpty()
    resize(side, columns)
    process = subprocess.Popen(
        [sys.executable, *command], stdin=side, stdout=side, stderr=side, env=_calm(variables)
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
    return process.wait(timeout=60), output.decode()


def into_pipe(*command: str, **variables: str) -> tuple[int, str]:
    """Exit code and what a Python script writes to a pipe."""
    ended = subprocess.run(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_calm(variables),
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stdout.decode()


def _calm(variables: dict[str, str]) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in CALM}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**kept, "TERM": "xterm-256color", "PYTHONPATH": path, **variables}


ROOT = Path(__file__).parents[2]
