"""Verdicts on the disk, and the cells that they are about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardmark.config.load import load_experiment
from shardmark.launch.verification import STEPS, cells_of, shortened
from shardmark.results.verification import (
    VERIFICATION_FILE,
    read_verification,
    write_verification,
)
from shardmark.trials.matrix import expand
from shardmark.trials.trial import Trial, cell_id
from tests.unit.verification.court import court
from tests.unit.verification.verdicts import VERIFICATION


def trials(*overrides: str) -> tuple[Trial, ...]:
    return tuple(expand(load_experiment("quickstart", overrides), "cpu").trials)


def dumped(trial: Trial) -> dict[str, Any]:
    return trial.model_dump(mode="json")


def test_verdicts_survive_the_file(tmp_path: Path) -> None:
    write_verification(tmp_path, VERIFICATION)
    assert read_verification(tmp_path) == VERIFICATION
    assert [path.name for path in tmp_path.iterdir()] == [VERIFICATION_FILE]


def test_a_real_verdict_survives_the_file(tmp_path: Path) -> None:
    judged = court()
    verdict = judged.judged()
    made = VERIFICATION.model_copy(update={"verdicts": (verdict,)})
    write_verification(tmp_path, made)
    assert read_verification(tmp_path) == made


def test_verdicts_are_found_by_their_cell() -> None:
    found = VERIFICATION.of("2" * 12)
    assert found is not None
    assert found.strategy == "zero-1"
    assert VERIFICATION.of("nonsense") is None


def test_worst_is_the_largest_in_tolerances() -> None:
    good, bad, untried = VERIFICATION.verdicts
    assert (good.worst, bad.worst, untried.worst) == (0.25, 900.0, None)


@pytest.mark.parametrize("keep", [0, 1, 100, -2])
def test_a_truncated_file_is_not_believed(tmp_path: Path, keep: int) -> None:
    write_verification(tmp_path, VERIFICATION)
    path = tmp_path / VERIFICATION_FILE
    path.write_bytes(path.read_bytes()[:keep])
    assert read_verification(tmp_path) is None


@pytest.mark.parametrize(
    "content", [b"[]", b"\xff\xfe", b'{"reference": "x", "steps": 3}', b'{"verdicts": 1}']
)
def test_a_foreign_file_is_not_believed(tmp_path: Path, content: bytes) -> None:
    (tmp_path / VERIFICATION_FILE).write_bytes(content)
    assert read_verification(tmp_path) is None


def test_an_unknown_key_is_not_believed(tmp_path: Path) -> None:
    text = VERIFICATION.model_dump_json()
    (tmp_path / VERIFICATION_FILE).write_text('{"invented": 1, ' + text[1:])
    assert read_verification(tmp_path) is None


def test_no_file_is_no_verdict(tmp_path: Path) -> None:
    assert read_verification(tmp_path) is None


def test_repeats_are_one_cell() -> None:
    many = trials("measure.repeats=3")
    cells = cells_of(many)
    assert len(many) == 3 * len(cells)
    assert {cell.strategy.name for cell in cells} == {"single", "ddp", "fsdp", "zero-1"}
    assert len({cell_id(dumped(cell)) for cell in cells}) == len(cells)


def test_what_trains_otherwise_is_another_cell() -> None:
    cells = cells_of(trials("matrix.strategy=[ddp]", "matrix.recipe.precision=[fp32, bf16]"))
    assert [cell.recipe.precision for cell in cells] == ["fp32", "bf16"]


def test_a_cell_is_named_by_what_it_trains() -> None:
    (trial,) = trials("matrix.strategy=[ddp]")
    name = cell_id(dumped(trial))
    assert len(name) == 12
    for same in (
        {"repeat": 7},
        {"id": "other"},
        {"experiment": "other"},
        {"measure": trial.measure.model_copy(update={"probe": False})},
        {"limits": trial.limits.model_copy(update={"trial_seconds": 5.0})},
    ):
        assert cell_id(dumped(trial.model_copy(update=same))) == name, same
    for other in (
        {"world_size": 4},
        {"device_type": "cuda"},
        {"recipe": trial.recipe.model_copy(update={"seed": 1})},
        {"workload": trial.workload.model_copy(update={"augment": "crop_flip"})},
    ):
        assert cell_id(dumped(trial.model_copy(update=other))) != name, other


def test_a_verified_trial_is_the_same_training_but_short() -> None:
    (trial,) = trials("matrix.strategy=[ddp]", "workload.validation_samples=300")
    short = shortened(trial)
    assert (short.recipe.epochs, short.recipe.steps) == (None, STEPS)
    assert short.workload.validation_samples == 256
    back = short.model_copy(update={"recipe": trial.recipe, "workload": trial.workload})
    assert back == trial
    assert short.recipe.model_copy(update={"epochs": trial.recipe.epochs, "steps": None}) == (
        trial.recipe
    )
