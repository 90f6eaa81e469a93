"""Verdicts on the equivalence of strategies, stored as `verification.json` of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from shardmark.base.evidence.checks import LARGEST, Check
from shardmark.base.files.stored import Stored
from shardmark.base.results.files import read_if_exists, write_model
from shardmark.base.results.schema import SCHEMA_VERSION

VERIFICATION_FILE = "verification.json"
LOGS_FOLDER = "verification-logs"
"""Folder of the ranks' output of cells that could not be verified, beside `verification.json`."""
CELLS_FILE = "cells.json"
"""Folders of the cells to compare."""
VERDICTS_FILE = "verdicts.json"
"""Verdicts on the cells that are finished."""
NOT_TRIED = "not tried"
"""Text of the cause if a cell's ranks or its reference could not run."""


class Cause(Stored):
    """The cause of a strategy's deviation, with the evidence for it."""

    text: str
    evidence: str
    setting: str | None = None
    """The setting that causes the deviation, if there is one."""
    training_fails: bool = False
    """True if the training has no finite loss, which need not be caused by the strategy."""
    first_deviation: str
    """The first quantity that deviates, and its place."""


class Verdict(Stored):
    """Result of the verification of a cell."""

    id: str
    """Identifier of the verified cell, which depends only on its content."""
    strategy: str
    strategy_options: dict[str, Any]
    world_size: int
    precision: str
    varied: dict[str, Any]
    equivalent: bool | None
    """None if the cell could not run or be decided; `cause` has the reason."""
    checks: tuple[Check, ...]
    cause: Cause | None
    guarantee: str | None = None
    """Guarantee of a strategy that is not intended to be equivalent."""
    mathematics: tuple[str, ...] = ()
    """Intended differences from a single device, which the reference reproduced."""
    accept: tuple[str, ...] = ()
    """Causes of a script's deviation that were to be accepted; `mathematics` has those found."""
    against: str = ""
    """First variant of a script, which this one was compared with, too."""
    tried_as: str | None = None
    """Cell of the same numerics and other sizes that was verified in place of this one."""

    @property
    def worst(self) -> float | None:
        """The largest difference of any check, in units of its tolerance."""
        units = [check.in_tolerances for check in self.checks if check.in_tolerances is not None]
        return max(units, default=None)


class Verification(Stored):
    """The verdicts of a run or of a `shardmark verify` command."""

    schema_version: Literal[1] = SCHEMA_VERSION
    reference: str
    steps: int
    verdicts: tuple[Verdict, ...]
    seconds: float | None = None
    """Time of the ranks and the comparison, for all commands that added verdicts."""

    def verdict_of(self, verdict_id: str) -> Verdict | None:
        return next((verdict for verdict in self.verdicts if verdict.id == verdict_id), None)


REFERENCE = "one process that does the work of all ranks in turn"


def deviation_text(tolerances: float | None) -> str:
    """Format a deviation in units of the tolerance."""
    if tolerances is None:
        return "-"
    return f"{tolerances:.2g}" if tolerances < LARGEST else "not finite"


def verdict_text(verdict: Verdict) -> str:
    """Describe a verdict for a user."""
    if verdict.guarantee is not None and verdict.equivalent is None:
        fails = f"; {verdict.cause.text}" if verdict.cause is not None else ""
        return f"other mathematics; guaranteed: {verdict.guarantee}{fails}"
    if verdict.equivalent is None:
        tried = verdict.cause is not None and verdict.cause.text != NOT_TRIED
        return "undecided" if tried else NOT_TRIED
    word = "equivalent" if verdict.equivalent else "NOT EQUIVALENT"
    if verdict.guarantee is not None or not verdict.checks:
        return word
    worst = deviation_text(verdict.worst)
    return f"{word}  (worst deviation: {worst} of its tolerance)"


def numerics_text(numerics: Sequence[str], owner: str = "its") -> str:
    """Describe intended differences from a single device; empty if there are none."""
    return f"by {owner} own definition, {'; '.join(numerics)}" if numerics else ""


def is_accepted(verdict: Verdict) -> bool:
    """Return True if the strategy may be compared: equivalent, guaranteed, or unavailable."""
    if verdict.equivalent is None and verdict.cause is not None:
        return verdict.cause.evidence.startswith("unavailable")
    return verdict.equivalent is not False


def is_undecided(verdict: Verdict) -> bool:
    """Return True if the training works and was compared, but the comparison cannot decide."""
    cause = verdict.cause
    if verdict.equivalent is not None or cause is None:
        return False
    return cause.text != NOT_TRIED and not cause.training_fails


def write_verification(folder: Path, verification: Verification) -> None:
    write_model(folder / VERIFICATION_FILE, verification)


def read_verification(folder: Path) -> Verification | None:
    """Read the verdicts of a run, or return None.  Raises the errors of `read_model`."""
    return read_if_exists(Verification, folder / VERIFICATION_FILE)
