"""Ranges that a study claims, beside what was measured of the same strategies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardmark.analysis.compare.comparison import compare
from shardmark.analysis.studies import load_paper
from shardmark.analysis.studies.against import Against, set_against
from shardmark.analysis.studies.claims import Claim, claims_of
from shardmark.cli import main
from shardmark.report.studies.against import against_sections
from shardmark.report.studies.against_notes import headline_notes
from shardmark.results.schema import TrialResult
from shardmark.results.store import load_run
from tests.golden.invented import invented_trial
from tests.unit.papers.runs import write_detection

MODEL = "resnet18"
MEASURED = {
    "ddp": (100.0, 1000.0, 0.75),
    "fsdp": (50.0, 250.0, 0.75),
    "ps-sync": (80.0, 1500.0, 0.75),
    "ps-async": (100.0, 1500.0, 0.625),
}
"""Samples per second, peak bytes, accuracy of the first repeat."""


def trial(strategy: str, repeat: int = 0, *, model: str = MODEL) -> TrialResult:
    rate, peak, accuracy = MEASURED[strategy]
    workload = {"name": "classification", "model": model, "dataset": "cifar10"}
    return invented_trial(
        strategy,
        4,
        repeat,
        metrics={
            "samples_per_second": rate + repeat,
            "peak_memory_bytes": peak,
            "accuracy_top1": accuracy,
        },
        trial={"experiment": "invented", "workload": workload, "recipe": {"global_batch": 128}},
    )


def against(path: Path, *trials: TrialResult, paper: str = "ovi-2025") -> Against:
    run = load_run(write_detection(path / "run", trials))
    return set_against(compare([run]), load_paper(paper))


def claims(found: Against, about: str, strategy: str) -> list[Claim]:
    return [
        one
        for one in claims_of(found)
        if (one.statement.about, one.statement.strategy) == (about, strategy)
    ]


def test_claims_stand_beside_what_was_measured(tmp_path: Path) -> None:
    found = against(tmp_path, *map(trial, MEASURED))
    for about, strategy, value in (
        ("memory_ratio", "fsdp", 0.25),
        ("epoch_seconds", "fsdp", 2.0),
        ("epoch_seconds", "ps-async", 0.8),
        ("accuracy_top1", "ps-async", -0.125),
    ):
        for claim in claims(found, about, strategy):
            assert claim.measured is not None
            assert claim.measured.value == pytest.approx(value)
            assert claim.measured.low is None


def test_repeats_give_intervals(tmp_path: Path) -> None:
    found = against(tmp_path, *(trial(name, repeat) for name in MEASURED for repeat in (0, 1)))
    (claim,) = claims(found, "accuracy_top1", "ps-async")
    assert claim.measured is not None
    assert (claim.measured.low, claim.measured.n) == (-0.125, 2)
    (claim,) = claims(found, "epoch_seconds", "ps-async")
    assert claim.measured is not None
    assert claim.measured.low is not None


def test_unpaired_repeats_differ_by_their_means(tmp_path: Path) -> None:
    found = against(tmp_path, trial("ps-sync"), trial("ps-async", 1))
    (claim,) = claims(found, "accuracy_top1", "ps-async")
    assert claim.measured is not None
    assert (claim.measured.value, claim.measured.low) == (-0.125, None)


def test_what_was_not_measured_is_blank(tmp_path: Path) -> None:
    found = against(tmp_path, trial("fsdp"))
    assert all(claim.measured is None for claim in claims_of(found))
    (claim,) = claims(found, "speedup", "ddp")
    assert (claim.row, claim.base) == (None, None)


def test_the_table_and_its_notes(tmp_path: Path) -> None:
    _, section, words, _ = against_sections(against(tmp_path, *map(trial, MEASURED)))
    cells = {
        about: (published, measured)
        for about, published, measured in zip(
            *(
                next(c for c in section.table.columns if c.title == title).cells
                for title in ("claim", "publ.", "meas.")
            ),
            strict=True,
        )
    }
    assert cells["speed-up, ddp / ?"] == ("2 to 3", "")
    assert cells["epoch time, fsdp / ddp"] == ("up to 6", "2.00")
    assert cells["epoch time, ps-async / ps-sync"] == ("down to 0.72", "0.80")
    points = "top-1 accuracy, ps-async minus ps-sync (points)"
    assert cells[points] == ("-17 to -4", "-12.5")
    text = " ".join(section.table.notes)
    assert any(
        note.startswith("ps-bounded, throughput: gain cancelled") for note in words.table.notes
    )
    assert "ddp / ?: what it is relative to is not stated" in text
    assert "refutes nothing" in text


def test_another_model_is_said_plainly(tmp_path: Path) -> None:
    notes = headline_notes(against(tmp_path, trial("ddp")))
    assert any(
        note.startswith("Another task: model published vgg16 or ") and "measured resnet18" in note
        for note in notes
    )
    assert "The study states no figures of single trainings, but claims: see below." in notes
    notes = headline_notes(against(tmp_path / "same", trial("ddp", model="vgg16")))
    assert not any(note.startswith("Another task") for note in notes)


def test_a_study_with_tables_alone_has_no_claims(tmp_path: Path) -> None:
    found = against(tmp_path, trial("ddp"), paper="lamsal-2025")
    assert claims_of(found) == ()
    assert all(not one.title.startswith("Claims") for one in against_sections(found))


def test_a_name_that_may_be_several_is_held_against_each(tmp_path: Path) -> None:
    """The poster says DeepSpeed, and not which stage."""
    names = {"fsdp": "ddp", "zero-2": "ps-sync", "zero-3": "fsdp"}
    trials = [
        trial(measured).model_copy(update={"strategy": name, "id": name})
        for name, measured in names.items()
    ]
    found = against(tmp_path, *trials, paper="fsdp-vs-deepspeed-poster")
    speed = [claim for claim in claims_of(found) if claim.statement.title == "FSDP"]
    assert [
        (claim.base.strategy, claim.measured.value)
        for claim in speed
        if claim.base is not None and claim.measured is not None
    ] == [("zero-2", 1.25), ("zero-3", 2.0)]
    (memory,) = (claim for claim in claims_of(found) if claim.statement.title == "DeepSpeed")
    assert memory.row is None
    _, section, *_ = against_sections(found)
    cells = {column.title: column.cells for column in section.table.columns}
    assert cells["meas. of"] == ("fsdp / zero-2", "fsdp / zero-3", "")
    assert cells["publ."] == ("1.13", "1.13", "down to 0.7")
    text = " ".join(section.table.notes)
    assert "the study does not say: FSDP is fsdp or fsdp-hybrid; DeepSpeed is zero-0 or" in text


def test_what_is_said_of_nodes_is_held_against_as_many_nodes(tmp_path: Path) -> None:
    """On however many ranks; and neither side is taken from another number of nodes."""
    peaks = {("fsdp", 1): 100.0, ("fsdp", 2): 50.0, ("zero-2", 1): 80.0, ("zero-2", 2): 45.0}
    trials = [
        invented_trial(
            name,
            2 * nodes,
            metrics={"peak_memory_bytes": peak, "samples_per_second": 10.0 * peak},
            varied={"placement.nodes": nodes},
            trial={"experiment": "invented", "nodes": nodes},
        )
        for (name, nodes), peak in peaks.items()
    ]
    found = against(tmp_path, *trials, paper="fsdp-vs-deepspeed-poster")
    assert [
        (claim.statement.about, claim.row.place, claim.base.place, claim.measured.value)
        for claim in claims_of(found)
        if claim.row is not None and claim.base is not None and claim.measured is not None
    ] == [
        (
            "samples_per_second",
            "fsdp on 2 ranks, nodes=1",
            "zero-2 on 2 ranks, nodes=1",
            1.25,
        ),
        (
            "memory_ratio",
            "zero-2 on 4 ranks, nodes=2",
            "fsdp on 4 ranks, nodes=2",
            0.9,
        ),
    ]
    _, section, *_ = against_sections(found)
    cells = {column.title: column.cells for column in section.table.columns}
    assert (cells["ranks"], cells["nodes"]) == (("2", "4"), ("1", "2"))
    without = against(tmp_path / "one", *trials[1:3], paper="fsdp-vs-deepspeed-poster")
    assert all(claim.row is None or claim.base is None for claim in claims_of(without))


def test_json_has_the_claims(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = str(write_detection(tmp_path / "run", [*map(trial, MEASURED)]))
    assert main(["compare", run, "--against", "ovi-2025", "--format", "json"]) == 0
    beside = json.loads(capsys.readouterr().out)["against"]
    claim = next(one for one in beside["claims"] if one["statement"]["relation"] == "difference")
    assert claim["row"]["strategy"] == "ps-async"
    assert claim["relative_to"]["strategy"] == "ps-sync"
    assert claim["measured"]["value"] == -0.125
