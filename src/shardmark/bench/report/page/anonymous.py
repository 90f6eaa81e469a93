"""A page without the names of machines and users, and without absolute paths."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from getpass import getuser
from itertools import chain
from typing import Any

from jinja2.utils import htmlsafe_json_dumps

from shardmark.base.results.store import RunFolder, StoredRun

PATH = "/..."
"""Text in place of an absolute path."""
_PATH = re.compile(r"(?<![\w:/.<+-])~?/[\w.@+~-]+(?:/[\w.@+~-]*)*")
_HOME = re.compile(r"/(?:home|Users)/([\w.-]+)")
_PARTS = re.compile(
    r"(<style.*?</style>|<script>.*?</script>|<script type=\"application/json\".*?</script>)",
    re.DOTALL,
)
_DATA = re.compile(r"(<script type=\"application/json\"[^>]*>)(.*)(</script>)", re.DOTALL)
LEAST_CHARACTERS = 3
"""Length of a name from which it is replaced: shorter ones are parts of other texts."""


def anonymous(page: str, runs: Iterable[StoredRun]) -> str:
    """Return the page with `machine`, `user` and `/...` in place of hosts, users and paths."""
    hosts: dict[str, None] = {}
    for run in runs:
        stored = RunFolder(run.path).read_environment().get("host")
        ranks = chain.from_iterable(trial.ranks for trial in run.trials)
        hosts |= dict.fromkeys((str(stored or ""), *(rank.host for rank in ranks)))
    hosts |= dict.fromkeys(host.partition(".")[0] for host in [*hosts])
    users = {getuser(), *_HOME.findall(page)} - {"root"}
    names = {**dict.fromkeys(users, "user"), **dict.fromkeys(hosts, "machine")}
    ordered = sorted((n for n in names if len(n) >= LEAST_CHARACTERS), key=len, reverse=True)
    either = "|".join(map(re.escape, ordered))
    named = re.compile(rf"(?<![\w-])({either})(?![\w-])") if ordered else None

    def hidden(text: str) -> str:
        text = _PATH.sub(PATH, text)
        return named.sub(lambda match: names[match[1]], text) if named else text

    def part(text: str) -> str:
        if (data := _DATA.fullmatch(text)) is not None:
            values = _with_texts(json.loads(data[2]), hidden)
            return f"{data[1]}{htmlsafe_json_dumps(values)}{data[3]}"
        return text if text.startswith(("<style", "<script")) else hidden(text)

    return "".join(map(part, _PARTS.split(page)))


def _with_texts(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        return {change(key): _with_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value
