"""CSV and Parquet, read back by pandas and pyarrow."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import shardmark
from shardmark.core.errors import InputError
from shardmark.core.metrics import METRICS
from shardmark.report.export import export_runs
from shardmark.report.export.source import sources_of
from shardmark.report.export.tables import TABLES, frame_of
from shardmark.results.store import StoredRun
from tests.unit.export.runs import HOSTILE, exportable, ok_trial

pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")

ARROW = {
    "string": ("string", "large_string"),
    "int64": ("int64",),
    "float64": ("double",),
    "bool": ("bool",),
    "boolean": ("bool",),
}
"""By type in pandas, in lower case."""


@pytest.fixture
def run(tmp_path: Path) -> StoredRun:
    return exportable(tmp_path / "first")


def test_parquet_holds_every_value_type_and_unit(run: StoredRun, tmp_path: Path) -> None:
    out = tmp_path / "made" / "tables"
    done = export_runs([run], "parquet", str(out))
    assert (done.where, done.trials) == (str(out), 2)
    assert {path.stem for path in out.iterdir()} == set(TABLES.values())
    for by, name in TABLES.items():
        expected = frame_of(sources_of([run]), by)
        stored = pq.read_table(out / f"{name}.parquet")
        assert stored.column_names == list(expected.columns)
        assert stored.num_rows == len(expected) > 0
        for field in stored.schema:
            values = [None if pd.isna(value) else value for value in expected[field.name]]
            assert stored[field.name].to_pylist() == values
            assert str(field.type) in ARROW[str(expected[field.name].dtype).lower()]
            unit = (field.metadata or {}).get(b"unit", b"").decode()
            assert unit == expected.attrs["units"].get(field.name, "")
            if field.name in METRICS:
                assert unit == METRICS[field.name].unit


def test_what_is_missing_is_null_and_no_zero(run: StoredRun, tmp_path: Path) -> None:
    export_runs([run], "parquet", str(tmp_path / "tables"))
    trials = pq.read_table(tmp_path / "tables" / "trials.parquet").to_pylist()
    assert trials[0]["mfu"] is None
    assert trials[0]["nonfinite_steps"] == 0
    assert trials[1]["outcome"] == "out_of_memory"
    assert trials[1]["failure"] == HOSTILE
    assert all(trials[1][name] is None for name in METRICS if name in trials[1])


def test_the_python_way_writes_the_same(run: StoredRun, tmp_path: Path) -> None:
    loaded = shardmark.load(run.path)
    loaded.to_parquet(tmp_path / "mine")
    export_runs([run], "parquet", str(tmp_path / "theirs"))
    for name in TABLES.values():
        mine, theirs = (tmp_path / who / f"{name}.parquet" for who in ("mine", "theirs"))
        assert pq.read_table(mine).equals(pq.read_table(theirs))
    frame = pd.read_parquet(tmp_path / "mine" / "trials.parquet")
    expected = loaded.to_pandas()
    assert frame["samples_per_second"].tolist() == pytest.approx(
        expected["samples_per_second"].tolist(), nan_ok=True
    )


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
                    assert cell == (shown.lower() if isinstance(value, bool | np.bool_) else shown)


def test_pandas_reads_the_csv(run: StoredRun, tmp_path: Path) -> None:
    export_runs([run], "csv", str(tmp_path / "tables"))
    frame = pd.read_csv(tmp_path / "tables" / "trials.csv")
    assert frame["synthetic"].tolist() == [False, False]
    assert frame["samples_per_second"][0] == pytest.approx(800 / 1.1)
    assert frame["failure"][1] == HOSTILE.replace("\n", " ")
    assert frame.loc[1, [name for name in METRICS if name in frame]].isna().all()


@pytest.mark.parametrize("target", ["csv", "parquet"])
def test_a_file_is_the_table_of_trials(run: StoredRun, tmp_path: Path, target: str) -> None:
    out = tmp_path / "new" / f"mine.{target}"
    export_runs([run], target, str(out))
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    read = pd.read_csv if target == "csv" else pd.read_parquet
    assert read(out)["id"].tolist() == [trial.id for trial in run.trials]


@pytest.mark.parametrize("target", ["csv", "parquet"])
def test_exporting_again_replaces(tmp_path: Path, target: str) -> None:
    out = tmp_path / "tables"
    first = exportable(tmp_path / "a", ok_trial(id="one"), ok_trial(id="two"))
    second = exportable(tmp_path / "b", ok_trial(id="three"))
    read = pd.read_csv if target == "csv" else pd.read_parquet
    for runs, ids in (
        ([first], ["one", "two"]),
        ([first], ["one", "two"]),
        ([second], ["three"]),
        ([first, second], ["one", "two", "three"]),
    ):
        export_runs(runs, target, str(out))
        assert read(out / f"trials.{target}")["id"].tolist() == ids


def test_the_place_must_fit(run: StoredRun, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(InputError, match=r"is a file; name a folder, or a file that ends in \.csv"):
        export_runs([run], "csv", str(tmp_path / "file"))
    with pytest.raises(InputError, match="is a folder; name a new file"):
        export_runs([run], "csv", str(tmp_path / "folder.csv"))
    for below in ("below", "below.csv", "below/deeper"):
        with pytest.raises(InputError, match=r"cannot be written: .*/file is a file; name another"):
            export_runs([run], "csv", str(tmp_path / "file" / below))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("target", "name"),
    [("parquet", "t.csv"), ("csv", "t.parquet"), ("csv", "t.PARQUET"), ("parquet", "t.pq")],
)
def test_a_name_of_another_kind_of_file_is_refused(
    run: StoredRun, tmp_path: Path, target: str, name: str
) -> None:
    suffix = Path(name).suffix
    expected = (
        rf"ends in \{suffix}, and the tables are \.{target};"
        rf" name a folder, or a file that ends in \.{target}$"
    )
    with pytest.raises(InputError, match=expected):
        export_runs([run], target, str(tmp_path / name))
    assert not (tmp_path / name).exists()
    export_runs([run], target, str(tmp_path / "v1.2"))
    assert (tmp_path / "v1.2" / f"trials.{target}").is_file()
