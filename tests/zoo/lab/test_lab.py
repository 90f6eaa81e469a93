"""Right submissions of the lab's exercises never fail, and wrong ones never pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardmark.cli import main
from tests.zoo.lab.submissions import RIGHT, WRONG, Submission

PASSED, FAILED, UNDECIDED = range(3)


def graded(submission: Submission, folder: Path) -> tuple[int, str]:
    """Return the exit code and the answer of the lab's grader."""
    assert main(["init", "--lab", "--out", str(folder)]) == 0
    submission.write(folder)
    command = [sys.executable, "grade.py", submission.file[0]]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert not ended.stderr
    assert submission.file[0] in (folder / "hand-in.md").read_text()
    return ended.returncode, ended.stdout


@pytest.mark.zoo
@pytest.mark.parametrize("submission", RIGHT, ids=lambda s: f"{s.file[0]}: {s.name}")
def test_a_right_submission_does_not_fail(submission: Submission, tmp_path: Path) -> None:
    code, answer = graded(submission, tmp_path / "lab")
    assert code != FAILED, answer
    assert code == PASSED or "run it again" in answer, answer  # a busy machine


@pytest.mark.zoo
@pytest.mark.parametrize("submission", WRONG, ids=lambda s: f"{s.file[0]}: {s.name}")
def test_a_wrong_submission_fails_for_its_fault(submission: Submission, tmp_path: Path) -> None:
    code, answer = graded(submission, tmp_path / "lab")
    assert code == FAILED or (submission.by_speed and code == UNDECIDED), answer
    assert submission.fault in answer


@pytest.mark.zoo
def test_an_exercise_that_is_not_written_fails(tmp_path: Path) -> None:
    code, answer = graded(Submission(name="empty", file="1_all_reduce.py"), tmp_path / "lab")
    assert (code, "exercise 1: failed: exercise 1: all-reduce" in answer) == (FAILED, True), answer
