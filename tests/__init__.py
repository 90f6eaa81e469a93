"""Tests; helpers that several of them share are modules here."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "v1"
