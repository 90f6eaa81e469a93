"""CSV and Parquet, read back by pandas and pyarrow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

import shardmark
from shardmark.report.export import export_runs
from shardmark.report.export.tables import TABLES, frame_of, sources_of
from shardmark.results.store import StoredRun
from tests.unit.export.runs import HOSTILE, exportable, ok_trial

pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")


def values_of(frame: pd.DataFrame) -> dict[str, list[object]]:
    return {str(k): list(v) for k, v in frame.astype(object).where(frame.notna(), None).items()}


READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    "csv": lambda path: pd.read_csv(path, dtype_backend="numpy_nullable"),
    "parquet": lambda path: pd.read_parquet(path, dtype_backend="numpy_nullable"),
}
BOTH = pytest.mark.parametrize("target", READERS)


@pytest.fixture
def run(tmp_path: Path) -> StoredRun:
    return exportable(tmp_path / "first")


@BOTH
def test_every_table_holds_every_value(run: StoredRun, tmp_path: Path, target: str) -> None:
    out = tmp_path / "made" / "tables"
    done = export_runs([run], target, str(out))
    assert (done.where, done.trials) == (str(out), 2)
    assert {path.stem for path in out.iterdir()} == set(TABLES.values())
    for by, name in TABLES.items():
        expected = frame_of(sources_of([run]), by)
        if target == "csv" and by == "trial":
            expected["failure"] = expected["failure"].replace(HOSTILE, HOSTILE.replace("\n", " "))
        stored = READERS[target](out / f"{name}.{target}")
        assert values_of(stored) == values_of(expected)
        if target == "parquet":
            assert [d.kind for d in stored.dtypes] == [d.kind for d in expected.dtypes]


def test_parquet_holds_units_and_is_the_same_from_python(run: StoredRun, tmp_path: Path) -> None:
    export_runs([run], "parquet", str(tmp_path / "tables"))
    shardmark.load(run.path).to_parquet(tmp_path / "mine")
    for by, name in TABLES.items():
        stored = pq.read_table(tmp_path / "tables" / f"{name}.parquet")
        assert stored.equals(pq.read_table(tmp_path / "mine" / f"{name}.parquet"))
        units = frame_of(sources_of([run]), by).attrs["units"]
        assert units
        for field in stored.schema:
            unit = (field.metadata or {}).get(b"unit", b"").decode()
            assert unit == units.get(field.name, "")


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
    for runs, ids in (([first], ["one", "two"]), ([first, second], ["one", "two", "three"])):
        export_runs(runs, target, str(out))
        assert READERS[target](out / f"trials.{target}")["id"].tolist() == ids
