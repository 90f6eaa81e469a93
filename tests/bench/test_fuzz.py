"""A small portion of the inputs of `benchmarks/fuzz.py`, the same each time."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import fuzz_inputs

from shardmark.core.errors import InputError


@pytest.mark.parametrize(
    ("target", "inputs"),
    [
        ("experiments", 8),
        ("results", 6),
        ("messages", 4),
        ("parameter_server", 25),
        ("left_files", 25),
    ],
)
def test_no_input_is_a_find(target: str, inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_inputs, "MOST_BYTES", 10**12)  # others may have loaded torch here
    monkeypatch.setattr(fuzz_inputs, "MOST_SECONDS", 60.0)
    measured = fuzz_inputs.attacked(target, 1, inputs)
    assert measured.finds == []
    assert measured.inputs == inputs


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (InputError("w", "f", "a"), "InputError"),
        (RecursionError("deep"), "RecursionError: deep"),
        (fuzz_inputs.HangError("long"), "HangError: long"),
    ],
)
def test_a_find_is_told_with_its_input(
    fault: BaseException, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(_: object, __: Path) -> None:
        raise fault

    faulty = fuzz_inputs.Target(name="messages", inputs=fuzz_inputs.RAW, act=act)
    monkeypatch.setitem(fuzz_inputs.TARGETS, "messages", faulty)
    (find,) = fuzz_inputs.attacked("messages", 1, 5).finds
    assert told in find
    assert "b'" in find
