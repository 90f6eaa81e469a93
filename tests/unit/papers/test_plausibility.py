"""How the checks of published figures are told, in every form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardmark.cli import main
from shardmark.report.studies.against_plausibility import plausibility_section, shown
from shardmark.report.table.sections import render_sections
from shardmark.results.schema import TrialResult
from tests.golden.invented import invented_trial
from tests.unit.papers.runs import write_detection
from tests.unit.papers.studies import peaks


@pytest.mark.parametrize(
    ("value", "metric", "text"),
    [
        (0.47e9, "peak_memory_bytes", "470.0 MB"),
        (1.5e9, "peak_memory_bytes", "1.50 GB"),
        (500.0, "peak_memory_bytes", "0.5 kB"),
        (1005.49, "total_seconds", "1005.5 s"),
        (0.1517, "map", "0.1517"),
        (0.788, "accuracy_top1", "78.8 %"),
        (2.5, "speedup", "2.500"),
        (0.8125, "scaling_efficiency", "81.2 %"),
    ],
)
def test_figures_have_their_unit(value: float, metric: str, text: str) -> None:
    assert shown(value, metric) == text


@pytest.mark.parametrize(
    ("value", "metric", "digit", "text"),
    [
        (0.47e9, "peak_memory_bytes", 0.01e9, "470 MB"),
        (1.5e9, "peak_memory_bytes", 0.1e9, "1.5 GB"),
        (1005.49, "total_seconds", 0.01, "1005.49 s"),
        (0.52, "accuracy_top1", 0.01, "52 %"),
        (0.7106, "accuracy_top1", 0.0001, "71.06 %"),
    ],
)
def test_figures_have_the_digits_of_the_study(
    value: float, metric: str, digit: float, text: str
) -> None:
    assert shown(value, metric, digit) == text


def test_the_section_says_what_was_computed() -> None:
    text = render_sections([plausibility_section(peaks(0.74e9, 0.27e9))])
    words = " ".join(text.split())
    assert words.startswith("Plausibility of the published figures")
    assert "fall <= (1 - 1/n) x (parameters + gradients + optimizer state" in words
    assert "SGD with momentum: 67.1 MB" in words
    assert "Not contradicted, with the number of figures: memory below" in words
    assert "Nothing in the study to check: speed-up above the number of devices; scaling" in words


def test_without_a_finding_the_section_says_so() -> None:
    section = plausibility_section(peaks(0.74e9, 0.70e9))
    assert section.table.columns == ()
    assert section.table.notes[0].startswith("Not contradicted, with the number of figures:")


def classified() -> TrialResult:
    workload = {"name": "classification", "model": "resnet18", "dataset": "cifar10"}
    return invented_trial("fsdp", 2, trial={"workload": workload, "recipe": {"global_batch": 64}})


def test_compare_prints_it_in_every_form(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = str(write_detection(tmp_path / "run", [classified()]))
    for form in ("text", "markdown", "latex"):
        assert main(["compare", run, "--against", "asu-fsdp-2024", "--format", form]) == 0
        found = capsys.readouterr().out
        assert "Plausibility of the published figures" in found
        assert "at most 89.5 MB" in found
    assert main(["compare", run, "--against", "asu-fsdp-2024", "--format", "json"]) == 0
    checks = json.loads(capsys.readouterr().out)["against"]["plausibility"]
    (saved,) = (one for one in checks if one["check"] == "memory saved by sharding")
    assert (saved["figures"], saved["margin"]) == (2, 0.25)
    (one,) = saved["findings"]
    assert one["published"] == pytest.approx(0.47e9)
    assert one["parts"]["SGD with momentum"] == pytest.approx(67.1e6, rel=1e-3)
