"""What stands in the cells and notes beside a study: its own digits, its words, no empty lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmark.analysis.compare.comparison import compare
from shardmark.analysis.studies import load_paper, paper_names
from shardmark.analysis.studies.against import Against, set_against
from shardmark.core.metrics import METRICS
from shardmark.report.studies.against import against_sections, headline_section
from shardmark.report.studies.against_labels import label
from shardmark.report.studies.against_notes import headline_notes
from shardmark.report.table.sections import render_sections
from shardmark.results.schema import Failure, Outcome, TrialResult
from shardmark.results.store import load_run
from tests.unit.papers.runs import detection_trial, scaled, write_detection

RESNET = {"name": "classification", "model": "resnet18", "dataset": "cifar10"}


def against(path: Path, *trials: TrialResult, paper: str) -> Against:
    run = load_run(write_detection(path / "run", trials))
    return set_against(compare([run]), load_paper(paper))


def cells(found: Against, title: str) -> tuple[str, ...]:
    columns = headline_section(found).table.columns
    return next(column.cells for column in columns if column.title == title)


def test_published_cells_have_the_digits_of_the_study(tmp_path: Path) -> None:
    """As in table 1: whole per cent where it prints whole ones, and GB."""
    found = against(tmp_path, detection_trial("ddp", 4), paper="asu-fsdp-2024")
    assert cells(found, "top-1 (%)\npubl.")[:6] == ("71.06", "52", "69.16", "50", "78.8", "53.6")
    assert cells(found, "peak (GB)\npubl.")[:6] == ("0.74", "0.24", "0.74", "0.24", "0.27", "0.21")
    assert cells(found, "time (s)\npubl.")[:6] == ("30.23", "34.12", "44.07", "48.46", "32", "35")
    assert "Peaks are in GB of 10^9 bytes on both sides." in headline_notes(found)


def test_trailing_zeros_stay_and_means_are_not_rounded(tmp_path: Path) -> None:
    found = against(tmp_path, *scaled(), paper="lamsal-2025")
    assert cells(found, "time (s)\npubl.")[:2] == ("590.2", "363.2")
    *_, by_epoch = against_sections(found)
    titles = {column.title: column.cells for column in by_epoch.table.columns}
    assert titles["mAP\npubl."][12] == "0.1440"
    assert titles["time (s)\npubl."][12] == "674"


def test_one_over_itself_has_no_interval(tmp_path: Path) -> None:
    found = against(tmp_path, *scaled(), paper="lamsal-2025")
    shown = cells(found, "time / ddp\nmeas.")
    assert shown[:2] == ("1.00", "1.00")
    assert "±" in shown[4]
    speedups = cells(found, "speedup\nmeas.")
    assert speedups[0] == "1.00"
    assert "±" in speedups[1]


def test_lines_without_a_number_are_not_there(tmp_path: Path) -> None:
    """A note names them."""
    failed = detection_trial("zero-2", 2, outcome=Outcome.FAILED, failure=Failure(reason="x"))
    found = against(tmp_path, *scaled(), failed, paper="lamsal-2025")
    assert "zero-2" not in cells(found, "strategy")
    assert "fsdp" in cells(found, "strategy")
    assert "Left out, not ok: zero-2 on 2 ranks (1 x failed)." in headline_notes(found)


@pytest.mark.parametrize("paper", ["ovi-2025", "fsdp-vs-deepspeed-poster"])
def test_a_study_without_figures_has_no_empty_table(tmp_path: Path, paper: str) -> None:
    found = against(tmp_path, *scaled(), paper=paper)
    section = headline_section(found)
    assert section.table.columns == ()
    assert "The study states no figures of single trainings, but claims: see below." in (
        section.table.notes
    )


@pytest.mark.parametrize("paper", paper_names())
def test_every_study_tells_its_findings_in_words(tmp_path: Path, paper: str) -> None:
    found = against(tmp_path, detection_trial("ddp", 2), paper=paper)
    (section,) = (one for one in against_sections(found) if one.title.endswith("in words"))
    texts = [one.text for one in found.paper.statements if one.text is not None]
    assert len(texts) == len(section.table.notes) > 0
    for text, note in zip(texts, section.table.notes, strict=True):
        assert text in note


@pytest.mark.parametrize("paper", paper_names())
def test_prose_has_no_raw_names_of_metrics(tmp_path: Path, paper: str) -> None:
    trials = [detection_trial("fsdp", 4, workload=RESNET), detection_trial("zero-2", 4)]
    found = against(tmp_path, *trials, paper=paper)
    headline, *rest = against_sections(found)
    words = render_sections([headline, *(one for one in rest if "epoch by" not in one.title)])
    raw = {name for name in METRICS if "_" in name} & set(words.replace(",", " ").split())
    assert raw == set()


def test_labels_are_words() -> None:
    assert label("epoch_seconds") == "epoch time"
    assert label("exposed_communication_seconds") == "exposed communication"
    assert label("accuracy_top1") == "top-1 accuracy"
    assert label("own_quality") == "own quality"
    assert not any("_" in label(name) for name in METRICS)


def test_what_a_study_says_against_itself_is_told(tmp_path: Path) -> None:
    found = against(tmp_path, detection_trial("fsdp", 2), paper="fsdp-vs-deepspeed-poster")
    (note,) = (one for one in headline_notes(found) if one.endswith("contradicts itself."))
    assert "memory efficiency" in note
    assert "less critical" in note
    assert "(table of configurations, next steps)" in note


def test_what_is_called_pre_trained_is_not_listed_as_unknown(tmp_path: Path) -> None:
    found = against(tmp_path, detection_trial("fsdp", 2), paper="asu-fsdp-2024")
    assert not any("whether the models began" in one for one in found.paper.unknown)
    assert any("pre-trained" in note and "(section 3.1)" in note for note in headline_notes(found))
