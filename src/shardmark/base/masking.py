"""Masks secrets in what is stored and shown: logins in URLs, and options of commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"
"""Text that replaces a value that may be secret."""
LOGIN = re.compile(r"(?<=//)[^/\s]*@")
"""User name in a URL, with or without a password."""
COMMAND_KEYS = ("command", "variant", "arguments")
"""Keys of experiments and results whose texts are commands, or parts of commands."""
_SECRET_OPTION = re.compile(
    r"(.*[-_.])?(token|secret|pass(word|wd|phrase)?|pwd|pat|credentials?|auth"
    r"|((api|access|secret|private|account|wandb|comet|hub|hf|ssh)[-_.]?)key|\w*(api|hub)(key|token))"
)
_ORDINARY = re.compile(
    r".*(pad|bos|eos|unk|cls|sep|mask|image|video|audio|special|stop|start|end|per|next|each"
    r"|num|max|min|class|prefix|dummy)[-_.]?token"
)
"""Options that name a token of a vocabulary, or a number of tokens."""
_SERVICE_TOKEN = re.compile(r"\b(hf|sk|gh[opsu]|github_pat|glpat|xox[bp]|AKIA)[-_A-Z0-9][\w-]{12,}")
"""Tokens of well-known services, wherever they stand."""


def masked_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command with the values of secret options and variables masked."""
    shown: list[str] = []
    secret_follows = False
    for word in words:
        name, equals, value = word.partition("=")
        option = name.lstrip("-+").lower()
        secret = bool(_SECRET_OPTION.fullmatch(option)) and not _ORDINARY.fullmatch(option)
        if secret_follows and not word.startswith("-"):
            shown.append(MASK)
        elif secret and value:
            shown.append(f"{name}{equals}{MASK}")
        else:
            shown.append(_SERVICE_TOKEN.sub(MASK, LOGIN.sub(f"{MASK}@", word)))
        secret_follows = secret and not equals and word.startswith("-")
    return shown


def shown_command(text: str) -> str:
    """A command for messages: masked, and with the commit that it runs in behind it."""
    commit, _, command = text.partition(" ")
    if not commit.startswith("@"):
        return f"`{masked_command(text)}`"
    return f"`{masked_command(command)}` in commit {commit[1:8]}"


def masked_command(text: str) -> str:
    """Return the command with masked values; a command without secrets stays as it is."""
    try:
        words = shlex.split(text)
    except ValueError:  # a quotation mark is missing
        words = text.split()
    shown = masked_words(words)
    if shown == words:
        return text
    return " ".join(word if MASK in word else shlex.quote(word) for word in shown)


def masked_commands(value: Any, *, within: bool = False) -> Any:
    """Return the content of a file with the texts below `COMMAND_KEYS` masked."""
    if isinstance(value, Mapping):
        return {
            key: masked_commands(item, within=within or key in COMMAND_KEYS)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [masked_commands(item, within=within) for item in value]
    return masked_command(value) if within and isinstance(value, str) else value
