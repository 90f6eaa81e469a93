"""Annotations are parsed once, and again when anything is wrong with what was kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.workloads.coco_folder import (
    COCO,
    annotation_file,
    edit,
    load,
    options,
    shown,
    write_folder,
)

from shardmark.workloads.datasets.cache import cache_folder
from shardmark.workloads.detection import coco_parsing as _coco_parsing


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDMARK_CACHE", str(tmp_path / "cache"))
    return write_folder(tmp_path / "data")


def entries() -> list[Path]:
    return sorted(cache_folder().glob("coco/*/*"))


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were parsed."""
    found: list[str] = []
    parse = _coco_parsing.parse

    def noted(file: Path) -> Any:
        found.append(file.name)
        return parse(file)

    monkeypatch.setattr(_coco_parsing, "parse", noted)
    return found


def test_annotations_are_parsed_once(folder: Path, parsed: list[str]) -> None:
    first = shown(load(folder))
    assert parsed == ["instances_train2017.json", "instances_val2017.json"]
    assert len(entries()) == 2
    assert str(shown(load(folder))) == str(first)
    assert len(parsed) == 2


def test_changed_annotations_are_parsed_again(folder: Path, parsed: list[str]) -> None:
    COCO.check(options(folder))
    file = annotation_file(folder, "train2017")
    stat = file.stat()
    edit(folder, lambda content: content["annotations"][1].update(bbox=[1, 2, 4, 4]))
    assert file.stat().st_size == stat.st_size
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert shown(load(folder))[10].boxes.tolist() == [[1, 2, 5, 6]]
    assert parsed[2:] == ["instances_train2017.json"]
    assert len(entries()) == 2, "the older entry is gone"


@pytest.mark.parametrize("name", ["boxes", "file_names", "mask_values"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "text", "other", "pickle"])
def test_damaged_entry_is_made_again(
    folder: Path, parsed: list[str], name: str, damage: str
) -> None:
    expected = str(shown(load(folder)))
    for entry in entries():
        file = entry / f"{name}.npy"
        content = file.read_bytes()
        if damage == "missing":
            file.unlink()
        elif damage == "other":
            np.save(file, np.load(file)[:-1])
        elif damage == "pickle":
            np.save(file, np.array([{}, []], object), allow_pickle=True)
        else:
            file.write_bytes({"empty": b"", "cut": content[:-3], "text": b"what?"}[damage])
    assert str(shown(load(folder))) == expected
    assert len(parsed) == 4
    load(folder)
    assert len(parsed) == 4, "it was stored"


def test_cache_that_cannot_be_written(
    folder: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("SHARDMARK_CACHE", str(folder / "file" / "cache"))
    assert len(shown(load(folder))) == 4
    assert len(parsed) == 4, "in check and in load"


def test_nothing_unfinished_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    assert len(shown(load(folder))) == 4
    assert entries() == []


def test_place_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDMARK_CACHE", "~/own")
    assert cache_folder() == Path("~/own").expanduser()
    monkeypatch.delenv("SHARDMARK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/shardmark")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/me")
    assert cache_folder() == Path("/me/.cache/shardmark")
