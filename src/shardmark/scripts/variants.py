"""Names of a script's variants, made from the words in which their commands differ."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath

from shardmark.core.errors import InputError
from shardmark.scripts.command import ScriptCommand

MAX_NAME = 40


def script_name(command: ScriptCommand) -> str:
    """Return the name of the script or module, without folders and suffix."""
    first, *rest = command.script
    return _clean(rest[0] if first == "-m" else PurePath(first).stem)


def named_variants(commands: Sequence[ScriptCommand]) -> tuple[str, dict[str, str]]:
    """Return the words that all commands begin with, and the other words of each by its name.

    Raises `InputError` for two equal commands.
    """
    lines = [["python", *c.script] if c.script[0] == "-m" else [*c.script] for c in commands]
    texts = [shlex.join(words) for words in lines]
    for text in texts:
        if texts.count(text) > 1:
            raise InputError("commands", f"`{text}` is there twice", "give different commands")
    first = min(lines, key=len)
    shared = next(
        (n for n, word in enumerate(first) if any(words[n] != word for words in lines)), len(first)
    )
    least = 3 if first[0] == "python" else 1
    while len(lines) > 1 and shared > least and first[shared - 1].startswith("-"):
        shared -= 1  # an option stays beside its value
    if shared < least:
        shared = 0
    groups = [_groups(words[shared or least :]) for words in lines]
    names: dict[str, str] = {}
    for command, words, options in zip(commands, lines, groups, strict=True):
        parts = [] if shared else [script_name(command)]
        parts += [
            _short(group, groups)
            for group in options
            if any(group not in other for other in groups)
        ]
        name = _clean(" ".join(parts)) or script_name(command)
        if name in names:
            name = f"{name}-{len(names) + 1}"
        names[name] = shlex.join(words[shared:])
    return shlex.join(first[:shared]), names


def _groups(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Split words into options with their values, and other words."""
    groups: list[tuple[str, ...]] = []
    for word in words:
        option, equals, value = word.partition("=")
        if word.startswith("-"):
            groups.append((option, value) if equals else (word,))
        elif groups and groups[-1][0].startswith("-"):
            groups[-1] += (word,)
        else:
            groups.append((word,))
    return groups


def _short(group: tuple[str, ...], all_groups: Sequence[Sequence[tuple[str, ...]]]) -> str:
    """Return `ddp` for `--strategy ddp` if another command has that option, or `lr=0.1`."""
    option, *values = group
    value = " ".join(values)
    having = sum(any(other[0] == option for other in groups) for groups in all_groups)
    if value and having > 1 and value[0].isalpha():
        return value
    name = option.lstrip("-")
    return f"{name}={value}" if value else name


def _clean(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9 ._=,+-]+", "-", text).strip(" -.=,+_")[:MAX_NAME].rstrip()
