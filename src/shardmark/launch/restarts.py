"""Why a trial's ranks were started anew, as the launchers of its nodes wrote it down."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from shardmark.launch.local.deaths import first_cause
from shardmark.results.schema import RestartRecord

RESTARTS_FILE = "restarts.jsonl"


class NoticedCause(BaseModel):
    """What one node's launcher noticed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    restart: int
    """The first is 1."""
    at_seconds: float
    """Unix time."""
    reason: str
    unprovoked: bool
    """Whether a process was ended by what no other rank's end can bring about."""


def read_restarts(directory: Path) -> tuple[NoticedCause, ...]:
    """Those that this node's launcher noticed the cause of."""
    file = directory / RESTARTS_FILE
    if not file.exists():
        return ()
    found = []
    for line in file.read_text().splitlines():
        try:
            found.append(NoticedCause.model_validate_json(line))
        except ValidationError:
            break  # cut short
    return tuple(found)


def first_causes(noticed: Iterable[NoticedCause]) -> tuple[RestartRecord, ...]:
    """Of each restart what was the cause: one death drags the other ranks down with it."""
    known: dict[int, list[NoticedCause]] = {}
    for one in noticed:
        known.setdefault(one.restart, []).append(one)
    firsts = [first_cause(known[number]) for number in sorted(known)]
    return tuple(
        RestartRecord(restart=one.restart, at_seconds=one.at_seconds, reason=one.reason)
        for one in firsts
        if one is not None
    )
