"""A fingerprint names the trained content: sources, data, versions and models."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardmark.base.results.fingerprint import DataRecord, Fingerprint, ModelRecord, SourceRecord
from shardmark.bench.launch.fingerprint import MAX_STATUSES, data_record, local_sources, versions_of

MODULE = """
import json, torch.nn
from pieces import layers
from pieces.deep import narrow as n

def net(num_classes):
    import late
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's module with a package beside it; `alone.py` is imported by nobody."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pieces").mkdir()
    for name, text in {
        "my_net.py": MODULE,
        "late.py": "from my_net import net",
        "alone.py": "",
        "pieces/__init__.py": "",
        "pieces/layers.py": "from . import shared\nfrom .deep import *\n",
        "pieces/deep.py": "",
        "pieces/shared.py": "import numpy, no_such_module",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path / "my_net.py"


def test_sources_include_all_local_imports(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = local_sources(["my_net"])
    files = {record.file for record in sources.values()}
    assert files == {
        *("my_net.py", "late.py", "pieces/__init__.py"),
        *("pieces/layers.py", "pieces/deep.py", "pieces/shared.py"),
    }
    monkeypatch.chdir("/")
    by_file = local_sources([str(module)])
    assert by_file.pop(str(module)).sha256 == sources["my_net"].sha256
    hashes = {name: record.sha256 for name, record in by_file.items()}
    assert hashes == {name: record.sha256 for name, record in sources.items()}
    monkeypatch.chdir(module.parent)
    module.write_text("this is no python (")
    assert list(local_sources(["my_net"])) == ["my_net"], "whoever imports it says what is wrong"
    assert (
        local_sources(
            ["json", "torch", "shardmark.bench.launch.trial_queue", "nowhere.to.be.found"]
        )
        == {}
    )


def test_folders_without_init_and_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Research repositories have the first, `pip install --target` makes the second."""
    for name, text in {
        "repository/task.py": "from project.models.net import net\nimport large",
        "repository/project/models/net.py": "",
        "target/large/__init__.py": "from large.deep.er import part",
        "target/large-1.0.dist-info/METADATA": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "target")
    monkeypatch.chdir(tmp_path / "repository")
    files = {record.file for record in local_sources(["task"]).values()}
    assert files == {"task.py", "project/models/net.py"}


def test_data_record_depends_on_names_sizes_and_times(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / "class" / "deeper").mkdir(parents=True, exist_ok=True)
        (tmp_path / "class" / "deeper" / f"{number}.png").write_bytes(bytes(number))
    first = tmp_path / "class" / "deeper" / "0.png"
    before = data_record(tmp_path)
    assert before is not None
    assert before.files == 3
    (tmp_path / ".hidden").touch()
    assert data_record(tmp_path) == before
    os.utime(first, (1, 1))
    touched = data_record(tmp_path)
    assert touched != before
    first.rename(first.with_name("9.png"))
    assert data_record(tmp_path) != touched
    assert data_record(tmp_path / "class" / "deeper" / "1.png") == data_record(
        tmp_path / "class" / "deeper" / "1.png"
    )
    assert data_record(tmp_path / "nothing") is None


def test_large_folder_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_STATUSES > 1000
    monkeypatch.setattr("shardmark.bench.launch.fingerprint.MAX_STATUSES", 2)
    for number in range(6):
        (tmp_path / f"{number}").touch()
    before = data_record(tmp_path)
    os.utime(tmp_path / "1", (1, 1))  # the sample is the first and the fifth
    assert data_record(tmp_path) == before
    os.utime(tmp_path / "4", (1, 1))
    assert data_record(tmp_path) != before


def test_versions_include_all_machines() -> None:
    def machine(torch: str, gpu: str | None) -> dict[str, object]:
        devices = [{"name": gpu}, {"name": gpu}] if gpu else []
        cuda = {"driver_version": "580.1" if gpu else None, "devices": devices}
        return {"shardmark": "1", "packages": {"torch": torch, "timm": None}, "cuda": cuda}

    one = versions_of([machine("2.11", None)])
    assert one.versions == {"shardmark": "1", "torch": "2.11"}
    two = versions_of([machine("2.11", "H100"), machine("2.12", "H200")])
    assert two.versions["torch"] == "2.11 and 2.12"
    assert two.versions["GPU"] == "H100 and H200"
    assert list(one.changes(two)) == ["torch (2.11, now 2.11 and 2.12)"]


def test_fingerprints_compare_common_parts_and_merge_all() -> None:
    before = Fingerprint(
        sources={"a": SourceRecord(file="a.py", sha256="1")},
        data={"data": DataRecord(files=2, index_sha256="1")},
        models={"m": ModelRecord(parameters=1000, structure_sha256="1")},
    )
    other = Fingerprint(sources={"b": SourceRecord(file="b.py", sha256="2")})
    assert list(before.changes(other)) == []
    assert before.merged(other).sources.keys() == {"a", "b"}
    now = Fingerprint(
        data={"data": DataRecord(files=3, index_sha256="2")},
        models={"m": ModelRecord(parameters=2000, structure_sha256="2")},
    )
    changes = list(before.changes(now))
    assert changes == ["data (2 files, now 3)", "the model (1,000 parameters, now 2,000)"]
    layers = ModelRecord(parameters=1000, structure_sha256="2")
    assert "layers" in next(before.changes(Fingerprint(models={"m": layers})))
