"""Names of a script's variants, made from the words in which their commands differ."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from itertools import pairwise, takewhile
from pathlib import PurePath

from shardmark.base.errors import InputError
from shardmark.scripts.command import ScriptCommand


def named_variants(commands: Sequence[ScriptCommand]) -> tuple[str, dict[str, str]]:
    """Return the words that all commands begin with, and the other words of each by its name.

    Raises `InputError` for two equal commands.
    """
    lines = [["python", *c.script] if c.script[0] == "-m" else [*c.script] for c in commands]
    columns = takewhile(lambda column: len(set(column)) == 1, zip(*lines, strict=False))
    shared = [word for word, *_ in columns]
    while shared and shared[-1].startswith("-"):
        shared.pop()  # an option stays beside its value
    if shared == ["python"]:
        shared = []
    variants: dict[str, str] = {}
    for words in lines:
        name, text = _name(words, lines), shlex.join(words[len(shared) :])
        if text in variants.values():
            raise InputError("commands", f"`{shlex.join(words)}` is there twice", "give it once")
        variants[f"{name}-{len(variants) + 1}" if name in variants else name] = text
    return shlex.join(shared), variants


def _name(words: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return the words that another command lacks, such as `ddp`, or the script's name."""
    parts: list[str] = []
    for option, word in pairwise(("", *words)):
        if any(word not in other for other in lines):
            of_option = option.startswith("-") and not word.startswith("-")
            if of_option and parts[-1:] == [option]:
                parts.pop()
            parts.append(f"{option}={word}" if of_option and word[:1].isdigit() else word)
    script = next(word for word in words if word not in {"python", "-m"})
    texts = (re.sub(r"^-+|\.py$", "", PurePath(part).name) for part in parts or [script])
    return re.sub(r"[^A-Za-z0-9 ._=,+-]+", "-", " ".join(texts)).strip(" -.=,+_")[:40].rstrip()
