"""Safe output of text from users, hosts and libraries to a terminal or a page."""

from __future__ import annotations

import json
import re
import shutil
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""Terminal sequences that set colours or a title, or move the cursor."""


def one_line(text: str) -> str:
    """Return the text on one line: white space becomes blanks, control characters are removed.

    The name of a strategy, a host or a file must not control the reader's terminal, change the
    direction of a line, or add a line to the output.
    """
    if text.isprintable():
        return text
    return "".join(
        " " if sign.isspace() else sign
        for sign in _SEQUENCE.sub("", text)
        if sign.isspace() or not unicodedata.category(sign).startswith("C")
    )


def printable(text: str) -> str:
    """Return the text with its line breaks and without other control characters."""
    return "\n".join(map(one_line, text.split("\n")))


def as_text(value: object) -> str:
    """Format a value of the experiment file without quotes and with sorted keys."""
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, default=str).replace('"', "")


def with_options(name: str, options: Mapping[str, object]) -> str:
    """Format a name with its options, such as `fsdp-tp (mesh={shard: 2, tensor: 2})`."""
    text = ", ".join(f"{key}={as_text(value)}" for key, value in options.items())
    return f"{name} ({text})" if text else name


def counted(number: int, noun: str) -> str:
    """Format a number of things, such as `1 step` or `3 steps`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(texts: Sequence[str], conjunction: str = "and", most: int = 3) -> str:
    """Return `a, b and c`; for a longer list the first ones and the number of the others."""
    shown = [*texts[: most - 1], f"{len(texts) - most + 1} more"] if len(texts) > most else texts
    if len(shown) == 1:
        return shown[0]
    return f"{', '.join(shown[:-1])} {conjunction} {shown[-1]}"


def say(*lines: str, error: bool = False) -> None:
    """Print each text on one line, without control characters, to standard output or error."""
    _write("".join(f"{one_line(line)}\n" for line in lines), error=error)


def say_text(text: str) -> None:
    """Print a text with line breaks.  Pass values in it through `one_line` first."""
    _write(printable(text))


def _write(text: str, *, error: bool = False) -> None:
    stream = sys.stderr if error else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()


def canonical(value: object) -> str:
    """Format content as JSON with sorted keys, such that equal content has equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=repr)


def render_json(document: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return strict JSON, without NaN, with a line break at the end."""
    return json.dumps(document, indent=2, allow_nan=False, default=str) + "\n"


def terminal_width() -> int | None:
    """Return the width of the terminal in characters; None if the output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
