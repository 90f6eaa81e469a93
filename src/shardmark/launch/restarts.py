"""Why a trial's ranks were started anew, as the launchers of its nodes wrote it down."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from shardmark.results.schema import RestartRecord

RESTARTS_FILE = "restarts.jsonl"


def read_restarts(directory: Path) -> tuple[RestartRecord, ...]:
    """Those that this node's launcher noticed the cause of."""
    file = directory / RESTARTS_FILE
    if not file.exists():
        return ()
    found = []
    for line in file.read_text().splitlines():
        try:
            found.append(RestartRecord.model_validate_json(line))
        except ValidationError:
            break  # cut short
    return tuple(found)


def first_causes(restarts: Iterable[RestartRecord]) -> tuple[RestartRecord, ...]:
    """Of each restart what was noticed first: one death drags the other ranks down with it."""
    first: dict[int, RestartRecord] = {}
    for one in restarts:
        known = first.get(one.restart)
        if known is None or one.at_seconds < known.at_seconds:
            first[one.restart] = one
    return tuple(first[number] for number in sorted(first))
