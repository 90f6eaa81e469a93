"""A reference that the device's memory does not hold, or nobody's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardmark.base.evidence.captures import Tolerances
from shardmark.base.results.verification import CELLS_FILE, VERDICTS_FILE, Verdict
from shardmark.bench.reference import verdict
from shardmark.bench.reference.reference import Hypothesis, ReferenceRuns
from shardmark.bench.reference.verdict import known_reference, verdict_on
from tests.unit.bench.reference.verification_cases import STEPS, OneReference, verification_case

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB")
SMALL = torch.device("meta")
"""Stands for a GPU: nothing fits."""


@pytest.fixture
def _small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = ReferenceRuns.tolerances

    def tolerances(self: ReferenceRuns) -> Tolerances:
        if self.device == SMALL:
            raise FULL
        return fits(self)

    monkeypatch.setattr(ReferenceRuns, "tolerances", tolerances)


@pytest.mark.usefixtures("_small_device")
def test_reference_on_the_cpu_proves_and_does_not_refute() -> None:
    case = verification_case("plain")
    known = known_reference(replace(case.runs, device=SMALL))
    assert known.runs.device.type == "cpu"
    trial = case.trial.model_copy(update={"device_type": "cuda"})

    def told(hypothesis: Hypothesis, **changes: Any) -> Verdict:
        capture = replace(case.runs.run(hypothesis), **changes)
        return verdict_on(capture, trial, STEPS, OneReference(known))

    assert told(Hypothesis()).equivalent is True
    undecided = told(Hypothesis(gradient_factor=2.0))
    assert undecided.equivalent is None
    assert undecided.cause is not None
    assert "only in host memory" in undecided.cause.text
    assert told(Hypothesis(), learning_rates=(0.5,) * STEPS).equivalent is False


def test_cell_without_memory_for_its_reference_is_undecided_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, tried = verification_case("plain"), list[ReferenceRuns]()

    def fails(runs: ReferenceRuns) -> None:
        tried.append(runs)
        raise FULL

    monkeypatch.setattr(verdict, "known_reference", fails)
    monkeypatch.setattr(verdict, "build_workload", lambda *_: case.runs.workload)
    monkeypatch.setattr(verdict, "read_capture", lambda *_: case.reference)
    cells = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        steps = case.trial.model_copy(update={"id": name})
        (tmp_path / name / "trial.json").write_text(steps.model_dump_json())
        cells.append(str(tmp_path / name))
    (tmp_path / CELLS_FILE).write_text(json.dumps(cells))
    verdict.compare_cells(tmp_path)
    stored = json.loads((tmp_path / VERDICTS_FILE).read_text())
    verdicts = [Verdict.model_validate(each) for each in stored]
    assert [(each.id, each.equivalent, each.checks) for each in verdicts] == [
        ("first", None, ()),
        ("second", None, ()),
    ]
    assert all(each.cause and "2 TiB" in each.cause.evidence for each in verdicts)
    assert len(tried) == 1, "it is not tried again"


@pytest.mark.parametrize(("tf32", "device", "more"), [
    (True, "cuda", 2.0**-11), (True, "cpu", 0.0), (False, "cuda", 0.0),
])  # fmt: skip
def test_tf32_rounds_to_eleven_bits(tf32: bool, device: str, more: float) -> None:
    case = verification_case("plain")
    recipe = case.trial.recipe.model_copy(update={"tf32": tf32})
    trial = case.trial.model_copy(update={"recipe": recipe, "device_type": device})
    floor = replace(case.runs, trial=trial, known={}).tolerances().floor
    assert floor == pytest.approx(case.tolerances.floor + 4 * more)
