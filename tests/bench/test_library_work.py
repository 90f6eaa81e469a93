"""The fit finds what steps were made of."""

from __future__ import annotations

import pytest
from benchmarks.library_work import Measured, fitted

TAKES = {"loop": 200.0, "gather": 1000.0, "tensor": 0.0}


def measured(**work: float) -> Measured:
    """A step that is the libraries' own code, and 500 operations that are predicted without it."""
    left = sum(TAKES[name] * count for name, count in work.items())
    return Measured(title=str(work), step_operations=left + 500, left=left, work=work)


def test_what_steps_were_made_of_is_found_again() -> None:
    cells = [
        measured(loop=1),
        measured(loop=1, gather=3, tensor=20),
        measured(loop=1, gather=7, tensor=44),
        measured(loop=1, gather=3, tensor=44),
    ]
    assert fitted(cells) == pytest.approx(TAKES, abs=1e-6)


def test_nothing_takes_less_than_nothing() -> None:
    cells = [
        Measured(title=title, step_operations=100, left=left, work={"loop": 1, "tensor": tensors})
        for title, left, tensors in (("one", 50.0, 1.0), ("many", 40.0, 9.0))
    ]
    assert fitted(cells)["tensor"] == 0
