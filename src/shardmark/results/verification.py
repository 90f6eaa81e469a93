"""Verdicts on whether strategies train the same thing: `verification.json` of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from shardmark.results.files import read_if_there, write_model
from shardmark.results.schema import SCHEMA_VERSION, Stored

VERIFICATION_FILE = "verification.json"
CELLS_FILE = "cells.json"
"""The folders of the cells to be judged."""
VERDICTS_FILE = "verdicts.json"
"""Those on them so far."""
NOT_TRIED = "not tried"
"""Text of the cause where a cell's ranks or its reference could not run."""
LARGEST = 1e300
"""Stands for a difference that is not finite: JSON has no infinity."""


class Check(Stored):
    """One quantity held against the reference."""

    name: str
    holds: bool
    found: float | str
    expected: float | str
    tolerance: float | None
    """Largest difference that counts as equal; None where only equality counts."""
    where: str | None = None
    """The rank, step or tensor that `found` is about: the worst one."""
    in_tolerances: float | None = None
    """The difference in units of the tolerance."""


class Cause(Stored):
    """Why a strategy deviates, as far as it could be shown."""

    text: str
    evidence: str
    setting: str | None = None
    """The setting to blame, if there is one."""
    training_fails: bool = False
    """The training itself gives no finite loss: true where the strategy need not be to blame."""
    first_deviation: str
    """The first quantity that deviates, and where."""


class Verdict(Stored):
    """One strategy, as it is set, on so many ranks."""

    id: str
    """The verified cell's; the same for the same content."""
    strategy: str
    strategy_options: dict[str, Any]
    world_size: int
    precision: str
    varied: dict[str, Any]
    equivalent: bool | None
    """None where it could not be tried: `cause` says why."""
    checks: tuple[Check, ...]
    cause: Cause | None
    guarantee: str | None = None
    """What a strategy that is not meant to be equivalent guarantees instead."""
    mathematics: tuple[str, ...] = ()
    """What it computes on purpose and one device would not: it was held against just that."""
    tried_as: str | None = None
    """The cell that was tried in its place: the same mathematics, other sizes."""

    @property
    def worst(self) -> float | None:
        """The largest difference of any check, in units of its tolerance."""
        units = [check.in_tolerances for check in self.checks if check.in_tolerances is not None]
        return max(units, default=None)


class Verification(Stored):
    """All verdicts of a run or of one `shardmark verify`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    reference: str
    steps: int
    verdicts: tuple[Verdict, ...]
    seconds: float | None = None
    """That the ranks and the comparison took; of all commands that added verdicts."""

    def of(self, verdict_id: str) -> Verdict | None:
        return next((verdict for verdict in self.verdicts if verdict.id == verdict_id), None)


REFERENCE = "one process that plays all ranks in turn"


def deviation_text(tolerances: float | None) -> str:
    """A deviation in units of the tolerance, for people."""
    if tolerances is None:
        return "-"
    return f"{tolerances:.2g}" if tolerances < LARGEST else "not finite"


def verdict_text(verdict: Verdict) -> str:
    """What is said of it, for people."""
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


def as_defined(mathematics: Sequence[str]) -> str:
    """What is said of a strategy whose mathematics are not one device's; nothing of others."""
    return f"by its own definition, {'; '.join(mathematics)}" if mathematics else ""


def accepted(verdict: Verdict) -> bool:
    """Whether nothing speaks against comparing it: equivalent, declared, or not to be had here."""
    if verdict.equivalent is None and verdict.cause is not None:
        return verdict.cause.evidence.startswith("unavailable")
    return verdict.equivalent is not False


def undecided(verdict: Verdict) -> bool:
    """Return True if the training works and was compared, but the comparison cannot decide."""
    cause = verdict.cause
    if verdict.equivalent is not None or cause is None:
        return False
    return cause.text != NOT_TRIED and not cause.training_fails


def write_verification(folder: Path, verification: Verification) -> None:
    write_model(folder / VERIFICATION_FILE, verification)


def read_verification(folder: Path) -> Verification | None:
    """The stored verdicts; None where there are none.  Raises as `read_model` does."""
    return read_if_there(Verification, folder / VERIFICATION_FILE)
