"""`init --lab` writes the lab; its link and its grader compute what its sheets say."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from shardmark.cli import main

FILES = {
    *("README.md", "link.py", "lab.py", "reference.py", "grade.py"),
    *("1_all_reduce.py", "2_buckets.py", "3_overlap.py", "4_sharded_optimizer.py"),
    *("5_accumulation.py", "6_find_the_fault.py"),
}


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    assert main(["init", "--lab", "--out", str(tmp_path / "lab")]) == 0
    return tmp_path / "lab"


def module_of(folder: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_of_the_lab", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_lab_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = tmp_path / "lab"
    assert main(["init", "--lab", "--out", str(lab)]) == 0
    assert {path.name for path in lab.iterdir()} == FILES
    assert f"next: read {lab / 'README.md'}" in capsys.readouterr().out
    for number in range(1, 6):
        (exercise,) = lab.glob(f"{number}_*.py")
        assert f'NotImplementedError("exercise {number}: ' in exercise.read_text()
        assert len(exercise.read_text().splitlines()) < 60


def test_a_lab_does_not_overwrite_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "4_sharded_optimizer.py").write_text("mine")
    assert main(["init", "--lab", "--out", str(tmp_path)]) == 2
    assert "4_sharded_optimizer.py" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["4_sharded_optimizer.py"]


@pytest.mark.parametrize(
    "options",
    [("--task", "rl"), ("--from", "train.py"), ("--ranks", "2"), ("--sbatch",)],
    ids=lambda options: options[0],
)
def test_options_of_experiments_are_refused_beside_a_lab(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--lab", *options, "--out", str(tmp_path / "lab")]) == 2
    error = capsys.readouterr().err
    assert "--lab" in error
    assert options[0] in error
    assert not (tmp_path / "lab").exists()


def test_the_link_takes_latency_and_the_bytes_on_a_ring(lab: Path) -> None:
    import torch

    link = module_of(lab, "link")
    data = torch.zeros(250_000)  # 1 MB
    sent = {name: link.sent_by(name, data, 4) / 1e6 for name in link.RING}
    assert sent == {
        **{"all_reduce": 1.5, "reduce": 1.0, "broadcast": 1.0, "all_gather": 3.0},
        **{"all_gather_into_tensor": 3.0, "reduce_scatter": 0.75, "reduce_scatter_tensor": 0.75},
    }
    assert link.sent_by("reduce_scatter", [data, data], 2) == 1e6
    assert link.duration(3e6) == pytest.approx(0.105)


COUNTS = {"messages": 5.0, "sent_bytes": 2_138_176.0, "state_bytes": 0, "step_seconds": 0.2}


@pytest.mark.parametrize(
    ("ratio", "error", "verdict"),
    [
        (1.28, 0.1, "passed"),
        (1.02, 0.06, "failed"),
        (0.6, 0.3, "failed"),
        (1.15, 0.2, "not decided"),
        (1.06, 0.05, "not decided"),
    ],
)
def test_the_race_gives_the_grade(ratio: float, error: float, verdict: str, lab: Path) -> None:
    result = {"variant": "b", "ratio": ratio, "low": ratio - error, "high": ratio + error}
    step = {"value": 0.140, "low": 0.137, "high": 0.143}
    rows = [{"strategy": "a"}, {"strategy": "b", "metrics": {"step_seconds": step}}]
    values = dict[str, str]()
    document = {"race": [result], "rows": rows}
    assert module_of(lab, "grade").judged("3", document, values)[0] == verdict
    assert values["step, ms"] == "140 (137 to 143)"


@pytest.mark.parametrize(
    ("exercise", "counts", "fault"),
    [
        ("3", {}, ""),
        ("3", {"messages": 34.0}, "34 messages a step"),
        ("3", {"sent_bytes": 0.0}, "0 MB a step"),  # past the link
        ("4", {"state_bytes": 2.14e6}, ""),
        ("4", {"state_bytes": 4.24e6}, "0.991 of Adam's state"),
    ],
)
def test_counts_that_are_not_asked_for_fail(
    exercise: str, counts: Mapping[str, float], fault: str, lab: Path
) -> None:
    values = dict[str, str]()
    grade = module_of(lab, "grade")
    found = grade.fault_of(exercise, {**COUNTS, **counts}, {"step_seconds": 0.1}, values)
    assert bool(found) == bool(fault)
    assert fault in found
    assert values["speed-up on 2 ranks"] == "1.00"


def test_the_page_to_hand_in_has_a_row_for_each_exercise(lab: Path) -> None:
    grade = module_of(lab, "grade")
    for number, verdict in (("2", "failed"), ("1", "passed"), ("2", "passed")):
        grade.hand_in(lab, number, {"exercise": number, "grade": verdict})
    lines = (lab / "hand-in.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith(("| 1", "| 2"))]
    assert [row.split(" | ")[:2] for row in rows] == [["| 1", "passed"], ["| 2", "passed"]]
    assert f"{os.cpu_count()} cores" in lines[-1]
