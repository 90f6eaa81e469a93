"""Surprises are explained from what was recorded; what is no surprise is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmark.bench.analysis.parts import NAMES
from shardmark.bench.report.answers.surprises import why_lines
from tests.unit.bench.report.answers.invented_rows import BATCH, MIB, Cell, compared, steps

FAST = steps(data=0.01, forward=0.1, backward=0.2, optimizer=0.01)


def cell(strategy: str, world_size: int, spans: dict[str, float], **more: object) -> Cell:
    rate = BATCH / spans["step_seconds"]
    metrics = {**spans, **more}
    return Cell(strategy=strategy, world_size=world_size, rates=(rate,), metrics=metrics)  # type: ignore[arg-type]


def why(path: Path, *cells: Cell, repeats: int = 3) -> list[str]:
    return why_lines(compared(path, cells, repeats=repeats))


@pytest.mark.parametrize(
    ("slow", "exposed", "said"),
    [
        (steps(data=0.21, forward=0.1, backward=0.2, optimizer=0.01), 0.0, "input"),
        (steps(data=0.01, forward=0.1, backward=0.3, optimizer=0.01), 0.1, "communication"),
        (steps(data=0.01, forward=0.3, backward=0.2, optimizer=0.01), 0.0, "computing"),
        (steps(data=0.01, forward=0.1, backward=0.2, optimizer=0.11), 0.0, "update"),
    ],
)
def test_answer_names_the_largest_part(
    tmp_path: Path, slow: dict[str, float], exposed: float, said: str
) -> None:
    fast = cell("ddp", 2, FAST, exposed_communication_seconds=0.0)
    (line,) = why(tmp_path, fast, cell("zero-0", 2, slow, exposed_communication_seconds=exposed))
    assert line.startswith("Why is zero-0 slower than ddp?")
    more_seconds = slow["step_seconds"] - FAST["step_seconds"]
    assert f"each step has {1000 * more_seconds:.0f} ms more of {NAMES[said]}" in line


def test_a_single_process_has_no_exposed_communication_to_record(tmp_path: Path) -> None:
    """139 ms of communication beside 131 ms of computation: the larger part is named."""
    slow = steps(data=0.01, forward=0.16, backward=0.41, optimizer=0.01)
    pair = cell("single", 1, FAST), cell("fsdp", 2, slow, exposed_communication_seconds=0.139)
    line = why(tmp_path, *pair)[0]
    assert "slower" in line
    assert "139 ms more of communication that nothing hides and 131 ms more of computing" in line


def test_slower_larger_group_is_explained(tmp_path: Path) -> None:
    slow = steps(data=0.01, forward=0.2, backward=0.4, optimizer=0.01)
    lines = why(tmp_path, cell("ddp", 2, FAST), cell("ddp", 4, slow))
    assert lines[0].startswith("Why is ddp slower on 4 ranks than on 2?")


@pytest.mark.parametrize("rates", [(100.0, 99.0, 101.0), (96.5, 97.5, 98.0), (60.0, 140.0, 90.0)])
def test_small_and_uncertain_differences_are_no_surprise(
    tmp_path: Path, rates: tuple[float, ...]
) -> None:
    fast = Cell(strategy="ddp", world_size=2, rates=(100.0, 101.0, 99.5))
    assert why(tmp_path, fast, Cell(strategy="zero-0", world_size=2, rates=rates)) == []


def test_one_repeat_shows_no_difference_to_explain(tmp_path: Path) -> None:
    slow = steps(data=0.21, forward=0.1, backward=0.2, optimizer=0.01)
    assert why(tmp_path, cell("ddp", 2, FAST), cell("zero-0", 2, slow), repeats=1) == []


def test_a_difference_that_no_part_explains_has_no_line(tmp_path: Path) -> None:
    fast = Cell(strategy="ddp", world_size=2, rates=(100.0, 101.0, 99.5))
    slow = Cell(
        strategy="zero-0", world_size=2, rates=(50.0, 51.0, 49.5), metrics={"data_seconds": None}
    )
    assert why(tmp_path, fast, slow) == []


@pytest.mark.parametrize(
    ("exposed", "answer"),
    [(0.1, "100 ms more of communication that nothing hides (12 collectives, not 3)"),
     (0.0, "90 ms more of computing and the script's own code between the passes")],
)  # fmt: skip
def test_scripts_that_mark_no_forward_pass_are_explained(
    tmp_path: Path, exposed: float, answer: str
) -> None:
    """A script's hooks see loading, backward and update; the rest of its step is its own."""
    marked = {"forward_seconds": None, "exposed_communication_seconds": 0.0, "collective_calls": 3}
    fast = cell("ddp", 2, FAST, **marked)
    slow = steps(data=0.02, forward=0.12, backward=0.27, optimizer=0.01)
    more = marked | {"exposed_communication_seconds": exposed, "collective_calls": 12}
    (line,) = why(tmp_path, fast, cell("zero-0", 2, slow, **more))
    assert line == f"Why is zero-0 slower than ddp?  each step has {answer}"


def memory_cell(strategy: str, state: float, activations: float, rest: float = 0.0) -> Cell:
    peak = (3 * state + activations + rest) * MIB
    metrics = {
        "parameter_bytes": state * MIB,
        "gradient_bytes": state * MIB,
        "optimizer_state_bytes": state * MIB,
        "activation_peak_bytes": activations * MIB,
    }
    return Cell(strategy=strategy, world_size=2, rates=(100.0,), peaks=(peak,), metrics=metrics)


@pytest.mark.parametrize(
    ("whole", "other", "said"),
    [
        (memory_cell("ddp", 1, 97), memory_cell("fsdp", 0.5, 97), ["only 1.5 %", "97 % of ddp's"]),
        (memory_cell("ddp", 20, 40), memory_cell("zero-3", 10, 40, rest=35),
         ["zero-3 save no memory", "30 MiB less model state, 35 MiB more other memory"]),
        (memory_cell("ddp", 20, 40), memory_cell("zero-3", 48, 40),
         ["zero-3 save no memory", "  84 MiB more model state"]),
        (memory_cell("ddp", 30, 10), memory_cell("zero-0", 30, 10), None),
        (memory_cell("ddp", 30, 10), memory_cell("fsdp", 15, 10), None),
    ],
    ids=["activations are most", "the rest grew", "state grew", "a replica", "a good saver"],
)  # fmt: skip
def test_small_saving_of_memory_is_explained(
    tmp_path: Path, whole: Cell, other: Cell, said: list[str] | None
) -> None:
    lines = why(tmp_path, whole, other)
    assert len(lines) == (said is not None)
    assert all(text in lines[0] for text in said or ())


def test_the_largest_surprise_of_each_kind_is_explained(tmp_path: Path) -> None:
    slow = steps(data=0.5, forward=0.3, backward=0.2, optimizer=0.01)
    slower = steps(data=0.5, forward=0.6, backward=0.2, optimizer=0.01)
    cells = [cell(name, 2, slow) for name in ("fsdp", "zero-1", "zero-2")]
    lines = why(tmp_path, cell("ddp", 2, FAST), *cells, cell("zero-3", 2, slower))
    questions = [line.partition("?")[0] for line in lines]
    assert questions == ["Why is zero-3 slower than ddp", "Why does fsdp save no memory"]
