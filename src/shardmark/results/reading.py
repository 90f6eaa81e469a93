"""Reads one trial's stored result, and says what must not be believed of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from shardmark.core.run_files import RESULT_FILE
from shardmark.results.bounds import out_of_bounds
from shardmark.results.files import difference
from shardmark.results.migrations import is_current, migrate
from shardmark.results.schema import Outcome, TrialResult


@dataclass(frozen=True, slots=True)
class Damaged:
    """A stored trial that must not be believed."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def read_result_of(folder: Path, *, verify: bool) -> TrialResult | Damaged | None:
    path = folder / RESULT_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        return Damaged(path, f"cannot be read: {error.strerror}")
    try:
        result = _parse(content)
    except ValidationError as error:
        return Damaged(path, _first_error(error))
    except ValueError as error:
        return Damaged(path, str(error))
    reason = _contradiction(result, folder, verify=verify)
    return result if reason is None else Damaged(path, reason)


def _contradiction(result: TrialResult, folder: Path, *, verify: bool) -> str | None:
    """How the folder contradicts the result, or None."""
    if result.id != folder.name:
        return f"belongs to another trial: its id is {result.id!r}"
    for name, record in result.files.items():
        reason = difference(folder / name, record, verify=verify)
        if reason is not None:
            return reason
    return _incoherent(result)


def _incoherent(result: TrialResult) -> str | None:
    """What no run writes, although each value by itself could be."""
    for key in ("workload", "recipe", "measure"):
        if not isinstance(result.trial.get(key, {}), dict):
            return f"trial.{key} is no mapping"
    given = result.trial.get("world_size", result.world_size)
    if given != result.world_size:
        return f"trial.world_size is {given!r}, but world_size is {result.world_size}"
    trained = any(rank.role == "worker" and rank.lost is None for rank in result.ranks)
    if result.outcome is Outcome.OK and not trained:
        return "its outcome is ok, but no rank that trains is in it"
    return out_of_bounds(result)


def _parse(content: bytes) -> TrialResult:
    """Today's version directly, which is fast; anything else by way of the migrations."""
    try:
        result = TrialResult.model_validate_json(content)
    except ValidationError:
        pass
    else:
        if is_current(result.schema_version):
            return result
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not whole JSON: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"holds no JSON object but a {type(document).__name__}")
    return TrialResult.model_validate(migrate(document))


def _first_error(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    found = repr(first["input"])
    shown = found if len(found) <= 60 else f"{found[:57]}..."
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{key}: found {shown}; {first['msg']}{more}"
