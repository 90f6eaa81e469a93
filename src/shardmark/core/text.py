"""Text of others stays text: the one place through which it leaves for a terminal or a page."""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Mapping

_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""What sets colours or a title, or moves a cursor."""


def one_line(text: str) -> str:
    """The text on one line: white space becomes blanks, other control characters vanish.

    Whoever named a strategy, a host or a file must not steer the reader's terminal, turn the
    direction of a line, or write a line that seems to be ours.
    """
    if text.isprintable():
        return text
    return "".join(
        " " if sign.isspace() else sign
        for sign in _SEQUENCE.sub("", text)
        if sign.isspace() or not unicodedata.category(sign).startswith("C")
    )


def printable(text: str) -> str:
    """The text with its line breaks, and no other control character."""
    return "\n".join(map(one_line, text.split("\n")))


def as_text(value: object) -> str:
    """A value of the experiment file without quotes, the same for the same content."""
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, default=str).replace('"', "")


def with_options(name: str, options: Mapping[str, object]) -> str:
    """`fsdp-tp (mesh={shard: 2, tensor: 2})`."""
    told = ", ".join(f"{key}={as_text(value)}" for key, value in options.items())
    return f"{name} ({told})" if told else name


def say(*lines: str, error: bool = False) -> None:
    """Print each on a line of its own, whatever it holds, to standard output or error."""
    _write("".join(f"{one_line(line)}\n" for line in lines), error=error)


def say_text(text: str) -> None:
    """Print a text whose line breaks are ours: a value in it must have become one line before."""
    _write(printable(text))


def _write(text: str, *, error: bool = False) -> None:
    stream = sys.stderr if error else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()
