"""Files of older versions are read by functions applied in order; newer ones are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.golden.invented import invented_trial, write_run

from shardmark.results import migrations
from shardmark.results.migrations import Document, VersionError, migrate
from shardmark.results.store import load_run


def first_to_second(document: Document) -> Document:
    return document | {"steps": ["1 to 2"]}


def second_to_third(document: Document) -> Document:
    return document | {"steps": [*document["steps"], "2 to 3"]}


@pytest.fixture
def third_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "SCHEMA_VERSION", 3)
    monkeypatch.setattr(migrations, "MIGRATIONS", {1: first_to_second, 2: second_to_third})


@pytest.mark.usefixtures("third_version")
def test_applies_every_function_in_order() -> None:
    old: Document = {"schema_version": 1}
    assert migrate(old) == {"schema_version": 3, "steps": ["1 to 2", "2 to 3"]}
    assert old == {"schema_version": 1}
    assert migrate({"schema_version": 2, "steps": []})["steps"] == ["2 to 3"]
    assert migrate({"schema_version": 3}) == {"schema_version": 3}


@pytest.mark.usefixtures("third_version")
@pytest.mark.parametrize(
    ("version", "message"),
    [
        (4, "schema_version 4 is newer than 3, the newest that this shardmark reads; update"),
        (0, "schema_version 0 is too old"),
        (True, "schema_version is True, not a whole number"),
        (None, "schema_version is None, not a whole number"),
    ],
)
def test_refuses_versions_that_it_cannot_read(version: object, message: str) -> None:
    with pytest.raises(VersionError, match=message):
        migrate({"schema_version": version})


def test_store_reads_an_old_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result of a made-up version 0, which called the strategy `method`."""

    def rename(document: Document) -> Document:
        return {("strategy" if key == "method" else key): document[key] for key in document}

    run = write_run(tmp_path / "run", [invented_trial()])
    path = run / "trials" / "ddp-2-0" / "result.json"
    document = json.loads(path.read_bytes()) | {"schema_version": 0}
    document["method"] = document.pop("strategy")
    path.write_text(json.dumps(document))
    assert len(load_run(run).damaged) == 1
    monkeypatch.setattr(migrations, "MIGRATIONS", {0: rename})
    (trial,) = load_run(run).trials
    assert trial.strategy == "ddp"
    assert trial.schema_version == 1
