"""Published beside measured: what matches, what differs, and what then compares."""

from __future__ import annotations

import csv
import io
import json
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from shardmark.analysis.compare.comparison import compare
from shardmark.analysis.studies import load_paper
from shardmark.analysis.studies.against import Against, Pair, set_against
from shardmark.cli import main
from shardmark.report.studies.against import against_sections
from shardmark.report.studies.against_notes import headline_notes
from shardmark.results.schema import Failure, Outcome, TrialResult
from shardmark.results.store import load_run
from tests.golden.invented import invented_trial
from tests.unit.papers.runs import answer, detection_trial, scaled, write_detection


def against(path: Path, *trials: TrialResult, paper: str = "lamsal-2025", **stored: Any) -> Against:
    run = load_run(write_detection(path / "run", trials, **stored))
    return set_against(compare([run]), load_paper(paper))


def pair_of(found: Against, strategy: str, ranks: int) -> Pair:
    (pair,) = (p for p in found.pairs if (p.title, p.world_size) == (strategy, ranks))
    return pair


def test_trainings_are_paired_in_the_studys_order(tmp_path: Path) -> None:
    found = against(tmp_path, *scaled(), detection_trial("zero-2", 2))
    assert [(pair.title, pair.world_size) for pair in found.pairs] == [
        *(("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4), ("zero-1", 2), ("zero-1", 4)),
        ("zero-2", 2),
    ]
    assert pair_of(found, "fsdp", 2).row is None
    assert pair_of(found, "zero-2", 2).figures is None
    notes = headline_notes(found)
    assert "Published, not measured here: fsdp on 2 ranks; fsdp on 4 ranks." in notes
    assert "Measured, not published: zero-2 on 2 ranks." in notes


def test_ratios_stand_beside_the_published_ones(tmp_path: Path) -> None:
    found = against(tmp_path, *scaled())
    ratios = pair_of(found, "ddp", 4).ratios
    assert ratios.speedup == pytest.approx(590.2 / 363.2)
    assert ratios.measured_speedup is not None
    assert ratios.measured_speedup.value == pytest.approx(sqrt(200 / 100 * 201 / 101))
    assert ratios.measured_speedup.low is not None
    ratios = pair_of(found, "zero-1", 2).ratios
    assert ratios.relative_time == pytest.approx(578.6 / 590.2)
    assert ratios.measured_relative_time is not None
    assert ratios.measured_relative_time.value == pytest.approx(sqrt(100 / 80 * 101 / 81))


def test_unpaired_repeats_have_no_interval(tmp_path: Path) -> None:
    found = against(tmp_path, detection_trial("ddp", 2), detection_trial("ddp", 4, 1, rate=150.0))
    speedup = pair_of(found, "ddp", 4).ratios.measured_speedup
    assert speedup is not None
    assert (speedup.value, speedup.low) == (1.5, None)


def test_missing_reference_leaves_ratios_blank(tmp_path: Path) -> None:
    ratios = pair_of(against(tmp_path, detection_trial("fsdp", 4)), "fsdp", 4).ratios
    assert ratios.speedup is not None
    assert ratios.measured_speedup is ratios.measured_relative_time is None


def test_a_reference_that_runs_alone_counts_for_all(tmp_path: Path) -> None:
    workload = {"name": "classification", "model": "resnet18", "dataset": "cifar10"}
    found = against(
        tmp_path,
        detection_trial("single", 1, workload=workload, rate=100.0),
        detection_trial("fsdp", 2, workload=workload, rate=80.0),
        detection_trial("ddp", 2, workload=workload, rate=50.0),
        paper="asu-fsdp-2024",
    )
    for strategy, expected in (("fsdp", 1.25), ("ddp", 2.0)):
        (pair,) = (p for p in found.pairs if p.row is not None and p.title == strategy)
        assert pair.ratios.measured_relative_time is not None
        assert pair.ratios.measured_relative_time.value == pytest.approx(expected)
    (unknown, _) = (pair for pair in found.pairs if pair.title == "baseline, 2 GPUs")
    assert unknown.row is None
    assert not found.scales


def test_other_hardware_is_said_plainly(tmp_path: Path) -> None:
    hardware, *_ = headline_notes(against(tmp_path, detection_trial()))
    assert hardware == (
        "Published on 4 x NVIDIA A6000 (Lambda Labs cloud instance); measured on 2 CPU cores (AMD"
        " EPYC): other hardware, so that seconds and bytes do not compare, and only ratios do. On a"
        " CPU the ranks share its cores: more ranks bring no more hardware, and the speed-up says"
        " nothing about more GPUs."
    )


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("NVIDIA H200", "measured on 2 x NVIDIA H200: other hardware"),
        ("NVIDIA RTX A6000", "measured on 2 x NVIDIA RTX A6000: the same kind of device"),
    ],
)
def test_devices_are_compared_by_kind(tmp_path: Path, device: str, expected: str) -> None:
    hardware, *_ = headline_notes(against(tmp_path, detection_trial(device=device)))
    assert expected in hardware
    assert "CPU" not in hardware


def test_unknown_machine_is_no_error(tmp_path: Path) -> None:
    hardware, *_ = headline_notes(against(tmp_path, detection_trial(), cores=None))
    assert "measured on a CPU: other hardware" in hardware


def test_another_task_is_stated_and_not_refused(tmp_path: Path) -> None:
    trial = detection_trial(
        workload={"model": "fcos_resnet18_fpn", "dataset": "digits-detection", "weights": None},
        recipe={"per_rank_batch": None, "global_batch": 16},
    )
    notes = headline_notes(against(tmp_path, trial))
    assert notes[1] == (
        "Another task: model published fasterrcnn_resnet50_fpn, measured fcos_resnet18_fpn; dataset"
        " published coco, measured digits-detection. Loss and quality do not compare, and ratios"
        " only show whether the strategies behave alike."
    )
    assert notes[2] == (
        "Also differs: weights published coco, measured none; epochs published 5, measured 2; batch"
        " published 8 (per GPU or in total is not stated), measured 16 over all ranks."
    )


def test_options_of_the_publication_are_lines_of_their_own(tmp_path: Path) -> None:
    bf16 = detection_trial(
        recipe={"precision": "bf16"}, precision="bf16", varied={"recipe.precision": "bf16"}
    )
    found = against(tmp_path, detection_trial(), bf16)
    headline, *_ = against_sections(found)
    variants = next(c for c in headline.table.columns if c.title == "variant")
    assert set(variants.cells[:2]) == {"fp32", "bf16"}
    assert any(
        note.startswith("Differs for ddp on 2 ranks") and "measured bf16" in note
        for note in headline.table.notes
    )


def test_how_the_batch_is_read_is_said(tmp_path: Path) -> None:
    note = "The study's batch of 8 is read as 8 per rank; it does not say which."
    assert note in headline_notes(against(tmp_path, detection_trial()))
    total = detection_trial(recipe={"per_rank_batch": None, "global_batch": 8})
    notes = headline_notes(against(tmp_path / "total", total))
    assert note.replace("per rank", "over all ranks") in notes


def test_versions_and_stated_ratios_are_told(tmp_path: Path) -> None:
    notes = headline_notes(against(tmp_path, detection_trial()))
    assert (
        "Software: published torch 2.x, deepspeed (no version); measured torch 2.15.0, deepspeed"
        " 0.19.8."
    ) in notes
    (stated,) = (note for note in notes if note.startswith("The study states: "))
    assert "speed-up of ddp on 4 ranks over 2: ~1.6 (section 3.1" in stated
    assert any(note.startswith("The study does not say: whether the batch") for note in notes)


def test_what_did_not_end_ok_is_left_out_and_named(tmp_path: Path) -> None:
    failed = detection_trial("fsdp", 2, outcome=Outcome.FAILED, failure=Failure(reason="x"))
    found = against(tmp_path, detection_trial(), failed)
    assert "Left out, not ok: fsdp on 2 ranks (1 x failed)." in headline_notes(found)
    nothing = against(tmp_path / "nothing", failed)
    assert headline_notes(nothing)[0].endswith("measured on nothing: no trial ended ok.")


def test_text_and_markdown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = str(write_detection(tmp_path / "run", scaled()))
    text = answer(capsys, run, "--against", "lamsal-2025")
    lines = [line.split() for line in text.splitlines()]
    assert "strategy  ranks    samples/s" in text
    assert ["ddp", "2", "1", "0.4698", "0.7500", "±0.0000", "588", "10.00", "±0.00", "0.1432",
            "0.1250", "±0.0000"] in lines  # fmt: skip
    assert ["fsdp", "4", "5", "0.4306", "437", "0.1443"] in lines
    markdown = answer(capsys, run, "--against", "lamsal-2025", "--format", "markdown")
    assert "### Against lamsal-2025: published (publ.) and measured (meas.)" in markdown
    assert "| fsdp | 4 | 5 | 0.4306 |  | 437 |  | 0.1443 |  |" in markdown
    by_epoch = answer(capsys, run, "--against", "lamsal-2025", "--epochs")
    assert by_epoch.startswith("Against lamsal-2025, epoch by epoch")
    assert "samples/s" not in by_epoch
    assert "other hardware, so that seconds and bytes do not compare" in " ".join(by_epoch.split())


def test_json_keeps_the_rows_and_adds_the_study(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = str(write_detection(tmp_path / "run", scaled()))
    plain = json.loads(answer(capsys, run, "--format", "json"))
    document = json.loads(answer(capsys, run, "--format", "json", "--against", "lamsal-2025"))
    assert document["rows"] == plain["rows"]
    beside = document["against"]
    assert beside["paper"]["name"] == "lamsal-2025"
    assert beside["hardware"]["same_kind"] is False
    assert [one["key"] for one in beside["differences"]] == ["recipe.epochs"]
    assert beside["batch_read_as"] == ["per rank"]
    ddp, _, fsdp, *_ = beside["trainings"]
    assert ddp["published"]["epoch_seconds"] == 590.2
    assert ddp["measured"]["epoch_seconds"]["n"] == 2
    assert ddp["relative_time"]["measured"]["value"] == 1
    assert ddp["epochs"][1]["published"]["train_loss"] == 0.4506
    assert ddp["epochs"][1]["measured"]["map"]["value"] == 0.25
    assert fsdp["row"] is fsdp["measured"] is None
    assert len(fsdp["epochs"]) == 5


def test_csv_has_both_sides(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = str(write_detection(tmp_path / "run", scaled()))
    options = ("--format", "csv", "--against", "lamsal-2025")
    lines = list(csv.DictReader(io.StringIO(answer(capsys, run, *options))))
    assert len(lines) == 6
    assert lines[0]["published_epoch_seconds"] == "590.2"
    assert lines[0]["against"] == "lamsal-2025"
    assert float(lines[1]["speedup_over_fewest"]) == pytest.approx(sqrt(200 / 100 * 201 / 101))
    assert (lines[2]["strategy"], lines[2]["samples_per_second"]) == ("fsdp", "")
    lines = list(csv.DictReader(io.StringIO(answer(capsys, run, *options, "--epochs"))))
    assert len(lines) == 30
    assert (lines[0]["epoch"], lines[0]["published_map"], lines[0]["map"]) == (
        "1",
        "0.1432",
        "0.125",
    )


def test_unknown_study_is_bad_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = str(write_detection(tmp_path / "run", [invented_trial()]))
    assert main(["compare", run, "--against", "lamsal"]) == 2
    assert "there is no paper 'lamsal'; allowed are" in capsys.readouterr().err
