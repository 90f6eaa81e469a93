"""CSV files, read back by pandas."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from shardmark.base.results.store import StoredRun
from shardmark.bench.report.export.tables import TABLES, frame_of, sources_of
from shardmark.bench.report.export.trackers import export_runs
from tests.unit.bench.report.export.runs import HOSTILE, exportable, ok_trial


def values_of(frame: pd.DataFrame) -> dict[str, list[object]]:
    return {str(k): list(v) for k, v in frame.astype(object).where(frame.notna(), None).items()}


def read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype_backend="numpy_nullable")


@pytest.fixture
def run(tmp_path: Path) -> StoredRun:
    return exportable(tmp_path / "first")


def test_every_table_holds_every_value(run: StoredRun, tmp_path: Path) -> None:
    out = tmp_path / "made" / "tables"
    done = export_runs([run], "csv", str(out))
    assert done == [f"csv: 2 trials to {out}", f'look: pandas.read_csv("{out}/trials.csv")']
    assert {path.stem for path in out.iterdir()} == set(TABLES.values())
    for by, name in TABLES.items():
        expected = frame_of(sources_of([run]), by)
        if by == "trial":
            expected["failure"] = expected["failure"].replace(HOSTILE, HOSTILE.replace("\n", " "))
        stored = read(out / f"{name}.csv")
        assert values_of(stored) == values_of(expected)


def test_a_file_is_the_table_of_trials(run: StoredRun, tmp_path: Path) -> None:
    out = tmp_path / "new" / "mine.csv"
    export_runs([run], "csv", str(out))
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert read(out)["id"].tolist() == [trial.id for trial in run.trials]


def test_exporting_again_replaces_and_reports_files_with_other_content(tmp_path: Path) -> None:
    out = tmp_path / "v1.2"
    first = exportable(tmp_path / "a", ok_trial(id="one"), ok_trial(id="two"))
    second = exportable(tmp_path / "b", ok_trial(id="three"))
    every = ", ".join(f"{name}.csv" for name in TABLES.values())
    report = [f"replaced files with other content: {every}"]
    for runs, ids, replaced in (
        ([first], ["one", "two"], []),
        ([first], ["one", "two"], []),
        ([first, second], ["one", "two", "three"], report),
    ):
        assert export_runs(runs, "csv", str(out))[1:-1] == replaced
        assert read(out / "trials.csv")["id"].tolist() == ids
