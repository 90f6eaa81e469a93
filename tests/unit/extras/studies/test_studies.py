"""Studies as data, and runs held against them: one joined table, claims, and what differs."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.errors import InputError
from shardmark.base.metrics import METRICS
from shardmark.base.results.schema import StabilityFinding, StabilityKind, TrialResult
from shardmark.base.results.store import load_run
from shardmark.bench.analysis.compare.comparison import compare
from shardmark.cli import main
from shardmark.extras.studies.against import Against, ClaimPair, Finding, Pair, set_against
from shardmark.extras.studies.against_view import against_tables, quantity_of
from shardmark.extras.studies.study import DERIVED, Batch, load_study, studies, study_names
from tests import ROOT, present
from tests.golden.invented import compare_trials, detection_trial, write_run

OTHERS = StabilityFinding(
    kind=StabilityKind.OTHER_PROCESSES, text="other programs used 80 % of the CPU", severity=0.8
)


def against(study: str, *trials: TrialResult) -> Against:
    return set_against(compare_trials(*trials), load_study(study))


def scaled() -> list[TrialResult]:
    """DDP and ZeRO-1 on 2 and 4 ranks; ZeRO-1 takes 1.25 times as long."""
    return [
        detection_trial(strategy, ranks, repeat, rate=50.0 * ranks / factor + repeat)
        for strategy, factor in (("ddp", 1.0), ("zero-1", 1.25))
        for ranks in (2, 4)
        for repeat in (0, 1)
    ]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["compare", *arguments]) == 0
    return capsys.readouterr().out


def pair_of(result: Against, strategy: str, ranks: int) -> Pair:
    (pair,) = (p for p in result.pairs if (p.title, p.world_size) == (strategy, ranks))
    return pair


@pytest.mark.parametrize("name", study_names())
def test_every_study_is_whole_and_documented(name: str) -> None:
    study = load_study(name)
    assert study.name == name
    assert name in studies()
    assert study.figures or study.claims
    trainings = [(e.title, e.world_size, *sorted(e.conditions.items())) for e in study.figures]
    assert len(set(trainings)) == len(trainings)
    for figures in study.figures:
        assert figures.place
        assert set(figures.headline) <= METRICS.keys() | set(DERIVED)
    for table in study.tables:
        published = {name for figures in study.figures for name in figures.headline}
        assert not published or {column.metric for column in table.columns} <= published
        assert {column.metric for column in table.columns} <= METRICS.keys() | set(DERIVED)
    for claim in study.claims:
        assert claim.metric in METRICS.keys() | set(DERIVED)
        assert (claim.value, claim.low, claim.high) != (None, None, None)
    page = ROOT / "docs" / "studies" / f"{name}.md"
    assert study.title in page.read_text(encoding="utf-8")


def test_a_study_on_one_line_and_an_unknown_name() -> None:
    study = load_study("asu-fsdp-2024")
    assert study.summary.startswith("Mohan, Phukan and Machavarapu (2024): one GPU and FSDP on two")
    assert "no date" in studies()["fsdp-vs-deepspeed-poster"]
    with pytest.raises(InputError, match=r"lamsal-2025"):
        load_study("lamsal-2024")


def test_published_and_measured_stand_side_by_side() -> None:
    result = against("lamsal-2025", *scaled())
    pair = pair_of(result, "ddp", 4)
    assert pair.published["epoch_seconds"] == pytest.approx(363.2)
    assert pair.published["speedup"] == pytest.approx(590.2 / 363.2)
    speedup = present(pair.measured["speedup"])
    assert speedup.value == pytest.approx(2, rel=0.01)
    assert speedup.low is not None
    relative = present(pair_of(result, "zero-1", 4).measured["relative_time"])
    assert relative.value == pytest.approx(1.25, rel=0.01)
    assert pair_of(result, "fsdp", 2).row is None, "published, and not measured"


def test_rows_match_by_the_studys_own_conditions() -> None:
    def trial(model: str) -> TrialResult:
        return detection_trial(
            "fsdp", 2, workload={"model": model}, varied={"workload.model": model}
        )

    result = against("asu-fsdp-2024", trial("resnet18"), trial("vgg16"))
    (matched,) = (p for p in result.pairs if p.figures is not None and p.row is not None)
    assert matched.conditions == "resnet18"
    assert [p.conditions for p in result.pairs if p.figures is None] == ["vgg16"]


def test_each_candidate_of_an_open_claim_has_a_line() -> None:
    trials = [detection_trial(name, 4, r) for name in ("fsdp", "zero-1", "zero-3") for r in (0, 1)]
    result = against("fsdp-vs-deepspeed-poster", *trials)
    faster = [each for each in result.claims if each.claim.metric == "samples_per_second"]
    assert [each.base.strategy for each in faster if each.base] == ["zero-1", "zero-3"]
    assert all(each.measured and each.measured.value == pytest.approx(1) for each in faster)
    (idle,) = (each for each in result.claims if each.claim.metric == "memory_ratio")
    assert idle.row is None, "the claim is about two nodes"


def test_times_are_of_the_same_samples_and_a_claim_needs_what_it_is_relative_to() -> None:
    trials = [detection_trial("ps-async", 4, rate=125.0), detection_trial("ps-sync", 4)]
    result = against("ovi-2025", *trials)
    (time,) = (each for each in result.claims if each.row and each.claim.metric == "epoch_seconds")
    assert present(time.measured).value == pytest.approx(0.8)
    (unsaid,) = (each for each in result.claims if not each.claim.over)
    assert unsaid.measured is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ["only ratios can be compared", "On a CPU all ranks share the cores"]),
        ({"device": "NVIDIA RTX A6000"}, ["so seconds can be compared"]),
        ({"workload": {"model": "resnet18"}}, ["Another task: model published fasterrcnn"]),
        ({"recipe": {"epochs": 7}}, ["Also differs: epochs published 5, measured 7"]),
        ({"recipe": {"per_rank_batch": 5}}, ["batch published 8 (per GPU or in total"]),
        (
            {"workload": {"training_samples": None}},
            ["training_samples published 12000"],
        ),
    ],
)
def test_notes_say_what_differs(changes: dict[str, Any], said: list[str]) -> None:
    table, *_ = against_tables(against("lamsal-2025", detection_trial(**changes)))
    notes = " ".join(table.notes)
    for text in said:
        assert text in notes


@pytest.mark.parametrize(
    ("of", "recipe", "differs"),
    [
        ("per rank", {"per_rank_batch": 32}, False),
        ("per rank", {"per_rank_batch": None, "global_batch": 64}, False),
        ("per rank", {"per_rank_batch": None, "global_batch": 32}, True),
        ("all ranks", {"per_rank_batch": 16}, False),
        ("all ranks", {"per_rank_batch": 32}, True),
        ("not stated", {"per_rank_batch": None, "global_batch": 32}, False),
    ],
)
def test_batches_are_read_as_the_study_counts_them(
    of: str, recipe: dict[str, Any], differs: bool
) -> None:
    batch = Batch.model_validate({"size": 32, "of": of})
    study = load_study("lamsal-2025").model_copy(update={"batch": batch})
    trial = detection_trial("ddp", 2, recipe=recipe)
    result = set_against(compare_trials(trial), study)
    assert ("batch" in dict(result.differences)) is differs


def test_the_table_in_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = {"cpu": {"usable_cores": 2, "model": "AMD EPYC"}}
    folder = write_run(tmp_path / "run", scaled(), environment=environment)
    table, *_ = against_tables(set_against(compare([load_run(folder)]), load_study("lamsal-2025")))
    assert table.cells("ranks") == ("2", "4", "2", "4", "2", "4")
    assert table.cells("epoch_seconds_published")[0] == "590"
    assert [cell[:3] for cell in table.cells("speedup_measured")[:2]] == ["1.0", "2.0"]
    arguments = (str(folder), "--view", "study:lamsal-2025")
    text = answer(capsys, *arguments, "--format", "markdown")
    for said in (
        "Against lamsal-2025: published (publ.) and measured (meas.)",
        "measured on 2 CPU cores (AMD EPYC)",
        "Published, not measured here: fsdp on 2; fsdp on 4",
        "docs/studies/lamsal-2025.md",
    ):
        assert said in text
    assert json.loads(answer(capsys, *arguments, "--format", "json"))["against"]
    lines = list(csv.DictReader(io.StringIO(answer(capsys, *arguments, "--format", "csv"))))
    others = ("table", "claim", "best_for")
    joined = [line["strategy"] for line in lines if not any(line[key] for key in others)]
    assert joined[::2] == ["ddp", "fsdp", "zero-1"]
    assert sum(bool(line["table"]) for line in lines) == 30, "the report's own lines"
    assert "epoch_seconds_published" in lines[0]


def claims_of(result: Against, text: str) -> list[ClaimPair]:
    return [pair for pair in result.claims if text in pair.claim.says]


def test_the_reports_own_lines_have_ones_own_beside_them() -> None:
    tables = {table.title: table for table in against_tables(against("lamsal-2025", *scaled()))}
    table = tables["Section 3.1, item 8: DDP"]
    assert table.cells("ranks") == ("2",) * 5 + ("4",) * 5
    assert table.cells("epoch") == tuple("12345") * 2
    assert table.cells("train_loss_published")[:2] == ("0.4698", "0.4506")
    assert table.cells("epoch_seconds_published")[-1] == "364"
    measured = table.values("epoch_seconds_measured")
    assert [value is None for value in measured[:5]] == [False] * 2 + [True] * 3
    fsdp = tables["Section 3.2, item 7: FSDP"]
    assert len(fsdp.rows) == 10
    assert set(fsdp.cells("epoch_seconds_measured")) == {"-"}


def test_two_runs_stand_side_by_side_under_their_names(tmp_path: Path) -> None:
    runs = [load_run(write_run(tmp_path / name, scaled())) for name in ("a100", "a10g")]
    tables = against_tables(set_against(compare(runs), load_study("lamsal-2025")))
    joined, ddp = tables[0], next(table for table in tables if table.title.endswith("DDP"))
    assert joined.cells("run")[:2] == ("a100", "a10g")
    titles = [column.title for column in ddp.columns if column.title.startswith("Time")]
    assert titles == ["Time publ.", "Time a100", "Time a10g"]
    assert ddp.cells("ranks") == ("2",) * 5 + ("4",) * 5
    assert "(a100)" in " ".join(joined.notes)
    assert "(a10g)" in " ".join(joined.notes)


def test_the_blocks_of_a_table_have_a_column_for_each_configuration() -> None:
    def trial(strategy: str, ranks: int) -> TrialResult:
        return detection_trial(strategy, ranks, workload={"model": "resnet18"})

    result = against("asu-fsdp-2024", trial("single", 1), trial("ddp", 2), trial("fsdp", 2))
    blocks = [table for table in against_tables(result) if table.title.startswith("Table 1")]
    assert [table.title.removeprefix("Table 1: ") for table in blocks] == [
        "GPU Memory Utilization",
        "GPU Peak Memory",
        "Average Time Per Epoch",
        "Total Time Taken",
        "Accuracy",
    ]
    columns, rows = blocks[0].for_people()
    assert [column.title for column in columns[1:]] == [
        "Baseline with 1 GPU publ.",
        "Baseline with 1 GPU meas.",
        "Baseline with 2 GPUs publ.",
        "Baseline with 2 GPUs (ddp) meas.",
        "FSDP with 2 GPUs publ.",
        "FSDP with 2 GPUs meas.",
    ]
    assert rows[0][:3] == ["resnet18", "0.13", "0.18"], "GB of parameters, gradients and state"


@pytest.mark.parametrize(
    ("factors", "finding"),
    [((0.8, 0.8), "holds"), ((1.3, 1.3), "does not hold"), ((0.7, 1.4), "not shown"),
     ((0.8,), "not shown")],
)  # fmt: skip
def test_a_claim_is_found_by_its_interval(factors: tuple[float, ...], finding: str) -> None:
    """ZeRO-1 takes these times of DDP's in the repeats; it is claimed to be the fastest."""
    trials = [
        detection_trial(strategy, 2, repeat, rate=100.0 / time + repeat / 10)
        for repeat, factor in enumerate(factors)
        for strategy, time in (("ddp", 1.0), ("zero-1", factor))
    ]
    result = against("lamsal-2025", *trials)
    (pair,) = claims_of(result, "fastest on 2")
    assert pair.finding == finding
    (larger,) = claims_of(result, "fastest on 4")
    assert larger.finding is Finding.TOO_FEW
    assert "measured on at most 2" in larger.reason


@pytest.mark.parametrize(
    ("cores", "finding", "reason"),
    [(2, Finding.OPEN, "4 ranks share 2 CPU cores"), (4, Finding.FAILS, "")],
)
def test_ranks_that_share_cores_show_nothing_about_more_devices(
    tmp_path: Path, cores: int, finding: Finding, reason: str
) -> None:
    """The study's DDP gains 1.6 times from 2 to 4 GPUs, and this one twice."""
    environment = {"cpu": {"usable_cores": cores}}
    run = load_run(write_run(tmp_path / "run", scaled(), environment=environment))
    result = set_against(compare([run]), load_study("lamsal-2025"))
    (gain,) = claims_of(result, "DDP gains")
    assert (gain.finding, gain.reason) == (finding, reason)
    (same_ranks,) = claims_of(result, "ZeRO-1 is fastest on 4")
    assert same_ranks.finding is Finding.FAILS


def test_a_claim_names_its_quantity_and_its_cells() -> None:
    trials = [
        detection_trial(name, ranks, metrics={"peak_memory_bytes": None})
        for name in ("ddp", "fsdp")
        for ranks in (2, 4)
    ]
    disturbed = [trial.model_copy(update={"stability": (OTHERS,)}) for trial in trials]
    result = against("lamsal-2025", *disturbed)
    (claims,) = (t for t in against_tables(result) if t.title == "Claims of lamsal-2025")
    lines = dict(zip(claims.cells("claim"), zip(claims.cells("quantity"), claims.cells("cells"),
                                                claims.cells("because"), strict=True),
                     strict=True))  # fmt: skip
    slower = "time for the same samples (seconds), ratio"
    disturbance = "disturbed: other programs used 80 % of the CPU"
    assert lines["FSDP is slower than DDP on 4 GPUs"] == (
        slower, "fsdp / ddp on 4 ranks", disturbance)  # fmt: skip
    assert lines["FSDP gains about 1.55 times from 2 to 4 GPUs"][:2] == (
        "throughput (samples/s), ratio", "fsdp on 4 / 2 ranks")  # fmt: skip
    assert lines["ZeRO-1 is fastest on 2 GPUs"][:2] == (
        slower, "zero-1 / ddp or fsdp on 2 ranks")  # fmt: skip
    assert lines["FSDP and ZeRO-1 take less memory than DDP"] == (
        "peak memory (bytes), ratio", "fsdp / ddp on 4 ranks", "no value was measured")  # fmt: skip


@pytest.mark.parametrize("name", study_names())
def test_every_claim_has_a_quantity_in_words(name: str) -> None:
    for claim in load_study(name).claims:
        assert "_" not in quantity_of(claim)
        assert claim.relation in quantity_of(claim)


def test_sharding_on_few_ranks_cannot_reach_a_published_ratio() -> None:
    trials = [detection_trial(name, ranks) for name in ("ddp", "fsdp") for ranks in (2, 4)]
    two, four = claims_of(against("ovi-2025", *trials), "4 to 6 times")
    assert (two.finding, four.finding) == (Finding.TOO_FEW, Finding.OPEN)
    assert "0.33 on 2 devices" in two.reason


def test_equal_is_not_less_and_counted_bytes_need_no_repeats() -> None:
    sharded = {"parameter_bytes": 22.35e6, "gradient_bytes": 22.35e6, "optimizer_state_bytes": 44e6}
    whole = {"parameter_bytes": 44.7e6, "gradient_bytes": 44.7e6, "optimizer_state_bytes": 44e6}
    states = {"ddp": whole, "zero-1": whole, "fsdp": sharded}
    trials = [detection_trial(name, 2, metrics=state) for name, state in states.items()]
    result = against("lamsal-2025", *trials)
    for text in ("gathers parameters", "saves more memory"):
        (pair,) = claims_of(result, text)
        assert pair.finding is Finding.FAILS
        assert pair.claim.cannot_mean
    equal = [trial.model_copy(update={"strategy": "fsdp"}) for trial in trials[1:2]]
    (tie,) = claims_of(against("lamsal-2025", *trials[:2], *equal), "saves more memory")
    assert tie.finding is Finding.FAILS, "a tie saves no more"


def test_a_lead_in_quality_from_one_seed_shows_nothing() -> None:
    trials = [
        detection_trial(name, 4, repeat, metrics={"map": quality})
        for name, quality in (("ddp", 0.0664), ("zero-1", 0.0463))
        for repeat in (0, 1)
    ]
    (pair,) = claims_of(against("lamsal-2025", *trials), "best mAP")
    assert pair.measured is not None
    assert pair.measured.low == pair.measured.high
    assert pair.finding is Finding.OPEN
    assert "one seed" in pair.reason


def test_a_studys_advice_stands_beside_ratios_to_its_reference() -> None:
    trials = [detection_trial("fsdp", 4), detection_trial("zero-2", 4, rate=50.0)]
    tables = against_tables(against("fsdp-vs-deepspeed-poster", *trials))
    (advice,) = (table for table in tables if table.title.startswith("Recommendations"))
    assert advice.cells("samples_per_second_ratio") == ("1.00 (1)", "0.50 (1)", "-", "-", "-")


@pytest.mark.parametrize("verified", [True, False])
def test_one_seed_refutes_a_stated_difference_of_verified_equals(*, verified: bool) -> None:
    trials = [detection_trial(name, 2, repeat) for name in ("ddp", "zero-1") for repeat in (0, 1)]
    comparison = compare_trials(*trials)
    rows = tuple(replace(row, equivalent=verified or None) for row in comparison.rows)
    comparison = replace(comparison, rows=rows)
    (pair,) = claims_of(set_against(comparison, load_study("lamsal-2025")), "begins 0.035 below")
    assert present(pair.measured).value == 0
    assert pair.finding is (Finding.FAILS if verified else Finding.OPEN)
    assert ("both train the same" in pair.reason) is verified


@pytest.mark.parametrize("scatter", [0.0, 0.0312])
def test_own_scatter_stands_beside_what_a_study_cannot_mean(scatter: float) -> None:
    trials = [
        detection_trial(name, 4, repeat, metrics={"map": 0.05 + scatter * repeat})
        for name in ("ddp", "zero-1")
        for repeat in (0, 1)
    ]
    tables = against_tables(against("lamsal-2025", *trials))
    (doubtful,) = (table for table in tables if table.title.endswith("cannot mean"))
    *_, note = doubtful.notes
    assert note == (
        "Here, repeats of one strategy differ by up to 0.0312 in mAP."
        if scatter
        else "Here, one seed was trained: measure.seeds=3 shows how far the mAP of one strategy"
        " differs from seed to seed."
    )
