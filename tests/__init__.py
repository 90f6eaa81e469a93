"""Tests; helpers that several of them share are modules here."""

from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "v1"

T = TypeVar("T")


def present(value: T | None) -> T:
    """Return a value that must not be missing."""
    assert value is not None
    return value
