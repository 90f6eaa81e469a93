"""A folder of small documents, and a cache of each test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmark.ranks.workloads.language.options import LanguageOptions

TEXTS = [f"def function_{number}():\n    return {'é' * number}{number}\n" for number in range(23)]
"""23 documents of 31 to 76 bytes."""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHARDMARK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number:02}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def chosen(texts: Path) -> LanguageOptions:
    """Bytes of those documents, packed."""
    return LanguageOptions(dataset="text", data_dir=str(texts), sequence_length=16)
