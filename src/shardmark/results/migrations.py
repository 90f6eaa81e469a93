"""Reads the files of older versions: one function a version, applied in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardmark.results.schema import SCHEMA_VERSION

Document = dict[str, Any]

MIGRATIONS: dict[int, Callable[[Document], Document]] = {}
"""Version -> function that turns a `result.json` of that version into the next one's."""


class VersionError(ValueError):
    """No function leads from the document's schema version to today's."""


def is_current(version: int) -> bool:
    """Whether a file of that version needs no migration."""
    return version == SCHEMA_VERSION


def migrate(document: Document) -> Document:
    """The document in today's version; the one given is left as it is.

    Raises `VersionError` for a version that is missing, newer than this package, or too old.
    """
    version = document.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool):
        raise VersionError(f"schema_version is {version!r}, not a whole number")
    if version > SCHEMA_VERSION:
        raise VersionError(
            f"schema_version {version} is newer than {SCHEMA_VERSION}, the newest that this"
            " shardmark reads; update shardmark"
        )
    while version < SCHEMA_VERSION:
        step = MIGRATIONS.get(version)
        if step is None:
            raise VersionError(f"schema_version {version} is too old: no migration reads it")
        version += 1
        document = step(document) | {"schema_version": version}
    return document
