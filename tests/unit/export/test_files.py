"""CSV and Parquet, read back by pandas and pyarrow."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

import shardmark
from shardmark.core.errors import InputError
from shardmark.report.export import export_runs
from shardmark.report.export.source import sources_of
from shardmark.report.export.tables import TABLES, frame_of
from shardmark.results.store import StoredRun
from tests.unit.export.runs import exportable, ok_trial

pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")

READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    "csv": pd.read_csv,
    "parquet": pd.read_parquet,
}
BOTH = pytest.mark.parametrize("target", READERS)


@pytest.fixture
def run(tmp_path: Path) -> StoredRun:
    return exportable(tmp_path / "first")


def test_parquet_holds_every_value_and_unit_from_python_too(run: StoredRun, tmp_path: Path) -> None:
    out = tmp_path / "made" / "tables"
    done = export_runs([run], "parquet", str(out))
    shardmark.load(run.path).to_parquet(tmp_path / "mine")
    assert (done.where, done.trials) == (str(out), 2)
    assert {path.stem for path in out.iterdir()} == set(TABLES.values())
    for by, name in TABLES.items():
        expected = frame_of(sources_of([run]), by)
        stored = pq.read_table(out / f"{name}.parquet")
        assert stored.num_rows == len(expected) > 0
        assert stored.equals(pq.read_table(tmp_path / "mine" / f"{name}.parquet"))
        assert stored.column_names == list(expected.columns)
        for field in stored.schema:
            values = [None if pd.isna(value) else value for value in expected[field.name]]
            assert stored[field.name].to_pylist() == values
            unit = (field.metadata or {}).get(b"unit", b"").decode()
            assert unit == expected.attrs["units"].get(field.name, "")
    types = {field.name: str(field.type) for field in stored.schema}
    assert (types["at_seconds"], types["rss_bytes"]) == ("double", "int64")


def test_csv_holds_every_value(run: StoredRun, tmp_path: Path) -> None:
    out = tmp_path / "tables"
    export_runs([run], "csv", str(out))
    for by, name in TABLES.items():
        expected = frame_of(sources_of([run]), by)
        with (out / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            header, *lines = csv.reader(file)
        assert header == list(expected.columns)
        for line, values in zip(lines, expected.itertuples(index=False), strict=True):
            for cell, value in zip(line, values, strict=True):
                if isinstance(value, float) and not pd.isna(value):
                    assert float(cell) == value
                else:
                    shown = "" if pd.isna(value) else " ".join(str(value).splitlines())
                    assert cell == (shown.lower() if shown in ("True", "False") else shown)


@BOTH
def test_a_file_is_the_table_of_trials(run: StoredRun, tmp_path: Path, target: str) -> None:
    out = tmp_path / "new" / f"mine.{target}"
    export_runs([run], target, str(out))
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert READERS[target](out)["id"].tolist() == [trial.id for trial in run.trials]


@BOTH
def test_exporting_again_replaces(tmp_path: Path, target: str) -> None:
    out = tmp_path / "v1.2"
    first = exportable(tmp_path / "a", ok_trial(id="one"), ok_trial(id="two"))
    second = exportable(tmp_path / "b", ok_trial(id="three"))
    for runs, ids in (
        ([first], ["one", "two"]),
        ([second], ["three"]),
        ([first, second], ["one", "two", "three"]),
    ):
        export_runs(runs, target, str(out))
        assert READERS[target](out / f"trials.{target}")["id"].tolist() == ids


@pytest.mark.parametrize(
    ("target", "name", "message"),
    [
        ("csv", "file", r"is a file; name a folder, or a file that ends in \.csv"),
        ("csv", "folder.csv", "is a folder; name a new file"),
        ("csv", "t.PARQUET", r"ends in \.PARQUET, and the tables are \.csv; name a folder, or"),
        ("parquet", "t.pq", r"ends in \.pq, and the tables are \.parquet"),
        ("parquet", "t.csv", r"ends in \.csv"),
    ],
)
def test_the_place_must_fit(
    run: StoredRun, tmp_path: Path, target: str, name: str, message: str
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(InputError, match=message):
        export_runs([run], target, str(tmp_path / name))
    assert (tmp_path / "file").read_text() == "mine"
    assert not any(tmp_path.glob("t.*"))
