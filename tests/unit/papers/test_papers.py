"""The studies say what was published: literal values, sums that agree, and every gap named."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from shardmark.analysis.studies import load_paper, paper_names, papers, parse_paper
from shardmark.analysis.studies.parts import Epochs, Hardware
from shardmark.analysis.studies.schema import Figures, Paper
from shardmark.analysis.studies.statements import Statement
from shardmark.config.load import load_experiment, preset_names
from shardmark.core.errors import InputError
from shardmark.core.metrics import METRICS
from shardmark.strategies import STRATEGIES
from shardmark.trials.matrix import expand

STATED_SPEEDUPS = {"ddp": 1.6, "fsdp": 1.55, "zero-1": 1.7}


def figures(paper: str, strategy: str | None, ranks: int, model: str | None = None) -> Figures:
    (found,) = (
        one
        for one in load_paper(paper).figures
        if (one.strategy, one.world_size, one.conditions.get("workload.model"))
        == (strategy, ranks, model)
    )
    return found


@pytest.mark.parametrize(
    ("strategy", "ranks", "epoch", "values"),
    [
        ("ddp", 2, 1, (0.4698, 588, 0.1432)),
        ("ddp", 2, 5, (0.4179, 592, 0.1359)),
        ("ddp", 4, 1, (0.4453, 362, 0.1517)),
        ("ddp", 4, 4, (0.4224, 364, 0.1445)),
        ("fsdp", 2, 3, (0.4371, 674, 0.1440)),
        ("fsdp", 2, 5, (0.4247, 676, 0.1449)),
        ("fsdp", 4, 4, (0.4411, 440, 0.1442)),
        ("zero-1", 2, 2, (0.4337, 579, 0.1441)),
        ("zero-1", 4, 2, (0.4308, 338, 0.1493)),
        ("zero-1", 4, 5, (0.4128, 340, 0.1475)),
    ],
)
def test_detection_study_by_epoch(
    strategy: str, ranks: int, epoch: int, values: tuple[float, float, float]
) -> None:
    """Loss, seconds and mAP."""
    table = figures("lamsal-2025", strategy, ranks).epochs
    assert table is not None
    assert list(table.by_number) == [1, 2, 3, 4, 5]
    names = ("train_loss", "epoch_seconds", "map")
    assert table.by_number[epoch] == dict(zip(names, values, strict=True))


@pytest.mark.parametrize(
    ("strategy", "ranks", "sums"),
    [
        ("ddp", 2, (2.2089, 2951, 0.7045)),
        ("ddp", 4, (2.1389, 1816, 0.739)),
        ("fsdp", 2, (2.2076, 3377, 0.7217)),
        ("fsdp", 4, (2.1933, 2185, 0.7293)),
        ("zero-1", 2, (2.1148, 2893, 0.718)),
        ("zero-1", 4, (2.1148, 1701, 0.7415)),
    ],
)
def test_sums_over_the_epochs_are_those_of_the_report(
    strategy: str, ranks: int, sums: tuple[float, float, float]
) -> None:
    """Loss, seconds and mAP of all five epochs, so that no digit of the thirty lines can change."""
    table = figures("lamsal-2025", strategy, ranks).epochs
    assert table is not None
    assert [sum(row[column] for row in table.rows) for column in (1, 2, 3)] == pytest.approx(sums)


@pytest.mark.parametrize(("strategy", "stated"), STATED_SPEEDUPS.items())
def test_stated_speedups_follow_from_the_times(strategy: str, stated: float) -> None:
    two, four = (figures("lamsal-2025", strategy, ranks).headline for ranks in (2, 4))
    assert two["epoch_seconds"] / four["epoch_seconds"] == pytest.approx(stated, abs=0.03)
    (statement,) = (
        one
        for one in load_paper("lamsal-2025").statements
        if one.about == "speedup" and one.strategy == strategy
    )
    assert (statement.value, statement.approximate) == (stated, True)


def test_headline_is_the_mean_of_the_times_and_the_last_of_the_rest() -> None:
    assert figures("lamsal-2025", "ddp", 2).headline == {
        "train_loss": 0.4179,
        "epoch_seconds": 590.2,
        "map": 0.1359,
    }


def test_classification_study() -> None:
    single = figures("asu-fsdp-2024", "single", 1, "resnet18")
    assert single.headline == {
        "epoch_seconds": 30.23,
        "peak_memory_bytes": 0.74e9,
        "accuracy_top1": 0.7106,
    }
    fsdp = figures("asu-fsdp-2024", "fsdp", 2, "mobilenet_v2")
    assert fsdp.headline["epoch_seconds"] == 35
    assert fsdp.headline["accuracy_top1"] == 0.536
    assert fsdp.training_seconds == fsdp.value("total_seconds") == 1135.67
    assert figures("asu-fsdp-2024", None, 2, "resnet18").headline["epoch_seconds"] == 44.07


TABLE_1 = {
    ("single", "resnet18"): (0.13, 0.74, 30.23, 906.825, 71.06),
    ("single", "mobilenet_v2"): (0.03, 0.24, 34.12, 1023.64, 52),
    (None, "resnet18"): (0.13, 0.74, 44.07, 1337.46, 69.16),
    (None, "mobilenet_v2"): (0.03, 0.24, 48.46, 1453.754, 50),
    ("fsdp", "resnet18"): (0.04, 0.27, 32, 1005.49, 78.8),
    ("fsdp", "mobilenet_v2"): (0.03, 0.21, 35, 1135.67, 53.6),
}
"""Memory in use and at the peak in GB, seconds of an epoch and in total, accuracy in per cent."""


def test_classification_study_has_its_whole_table() -> None:
    found = {
        (one.strategy, one.conditions["workload.model"]): (
            one.others["GPU memory utilization, GB"],
            one.headline["peak_memory_bytes"] / 1e9,
            one.headline["epoch_seconds"],
            one.training_seconds,
            one.headline["accuracy_top1"] * 100,
        )
        for one in load_paper("asu-fsdp-2024").figures
    }
    assert found.keys() == TABLE_1.keys()
    for key, values in TABLE_1.items():
        assert found[key] == pytest.approx(values)


def test_the_poster_has_no_figures_of_trainings() -> None:
    """Two ratios between names that may be several strategies; nobody knows who, when, or which."""
    paper = load_paper("fsdp-vs-deepspeed-poster")
    assert (paper.authors, paper.year, paper.batch, paper.figures) == ((), None, None, ())
    assert paper.conditions["recipe.epochs"] == 15
    assert paper.conditions["recipe.optimizer.lr"] == 0.01
    (machine,) = paper.hardware
    assert (machine.device_count, machine.node_count) == (8, 2)
    assert machine.has("NVIDIA A100-SXM4-40GB")
    assert not machine.has("NVIDIA A100-SXM4-80GB")
    ratios = [
        (one.words, one.relative_to.title, one.value, one.low)
        for one in paper.statements
        if one.relative_to is not None
    ]
    assert ratios == [
        ("FSDP on 4 ranks of 1 node", "DeepSpeed", 1.13, None),
        ("DeepSpeed on 8 ranks of 2 nodes", "FSDP", None, 0.7),
    ]
    assert paper.citation.startswith("authors not stated, University of Wisconsin: Benchmarking")


@pytest.mark.parametrize("name", paper_names())
def test_studies_speak_of_what_the_package_knows(name: str) -> None:
    paper = load_paper(name)
    assert paper.name == name
    assert paper.preset in preset_names()
    assert paper.reference in STRATEGIES
    metrics = {name for one in paper.figures for name in one.headline}
    metrics |= {statement.about for statement in paper.statements}
    assert metrics <= METRICS.keys()
    assert {one.strategy for one in paper.figures} <= {*STRATEGIES, None}
    named = [*paper.statements, *(one.relative_to for one in paper.statements if one.relative_to)]
    assert {name for one in named for name in one.strategies} <= STRATEGIES.keys()
    labels = {one.label for one in paper.figures}
    assert all(one.strategies or one.label in labels for one in named)
    assert paper.unknown


def test_study_of_parameter_servers() -> None:
    """Every cell of the preset once, and the abstract's claims as ratios."""
    paper = load_paper("ovi-2025")
    experiment = load_experiment("ovi-2025")
    assert {key: tuple(experiment.matrix[key]) for key in paper.varied} == paper.varied
    assert len(expand(experiment, "cuda").trials) == 5 * 2 * 5 * 2
    claims = {
        (one.about, one.strategy, one.low, one.high) for one in paper.statements if one.text is None
    }
    assert claims == {
        ("speedup", "ddp", 2, 3),
        ("memory_ratio", "fsdp", 0.1667, 0.25),
        ("memory_ratio", "fsdp", None, 0.4),
        ("epoch_seconds", "fsdp", None, 6),
        ("epoch_seconds", "ps-async", 0.72, None),
        ("accuracy_top1", "ps-async", -0.17, -0.04),
    }


def test_summaries_are_one_line_each() -> None:
    assert papers()["lamsal-2025"] == (
        "Lamsal (2025): DDP, FSDP and ZeRO-1 on 2 and 4 GPUs, Faster R-CNN on COCO;"
        " 4 x NVIDIA A6000 (Lambda Labs cloud instance)"
    )
    assert "GPUs of a kind not stated" in papers()["asu-fsdp-2024"]
    assert not any("\n" in line for line in papers().values())


def test_unknown_study_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"no paper 'lamsal-2024'; allowed are .*nearest: 'lamsal"):
        load_paper("lamsal-2024")


def test_a_mistake_in_a_file_names_its_place() -> None:
    with pytest.raises(InputError, match="some file: title"):
        parse_paper("name: x", "some file")


@pytest.mark.parametrize(
    ("columns", "rows", "message"),
    [
        (("map", "epoch"), ((0.1, 1.0),), "not `epoch` first"),
        (("epoch", "map", "map"), ((1.0, 0.1, 0.1),), "each once"),
        (("epoch", "map"), ((1.0,),), "1 numbers in"),
        (("epoch", "map"), ((2.0, 0.1), (1.0, 0.1)), "do not count up"),
        (("epoch", "map"), ((1.5, 0.1),), "do not count up"),
        (("epoch", "map"), ((0.0, 0.1),), "do not count up"),
    ],
)
def test_tables_by_epoch_are_checked(
    columns: tuple[str, ...], rows: tuple[tuple[float, ...], ...], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        Epochs(columns=columns, rows=rows)


def test_a_statement_has_one_name() -> None:
    Statement(about="map", label="either", any_of=("ddp", "fsdp"), place="table")
    for names in ({}, {"strategy": "ddp", "label": "it"}):
        with pytest.raises(ValidationError, match="exactly one of strategy and label"):
            Statement.model_validate({"about": "map", "place": "table", **names})


def test_figures_name_known_hardware_and_each_training_once() -> None:
    data = load_paper("lamsal-2025").model_dump(mode="json")
    with pytest.raises(ValidationError, match="two figures are of the same training"):
        Paper.model_validate(data | {"figures": [data["figures"][0]] * 2})
    figure = data["figures"][0] | {"hardware": "moon"}
    with pytest.raises(ValidationError, match="no hardware is named 'moon'"):
        Paper.model_validate(data | {"figures": [figure]})


def test_devices_are_known_by_their_names() -> None:
    hardware = Hardware(name="x", device="NVIDIA A6000", device_count=4, tokens=("A6000",))
    assert hardware.has("NVIDIA RTX A6000")
    assert not hardware.has("NVIDIA RTX 6000 Ada Generation")
    assert not hardware.has("cpu")
    assert hardware.model_copy(update={"node_count": 2}).text == "4 x NVIDIA A6000 on 2 nodes"


def test_a_study_of_ranges_on_two_clusters_fits() -> None:
    """As an abstract states them: no table, two kinds of GPU, asynchronous strategies."""
    paper = parse_paper(
        """
name: other
title: Other
authors: [A. Author]
year: 2025
kind: article
compares: DDP, FSDP and parameter servers
conditions: {}
batch: null
reference: ddp
hardware:
  - {name: fast, device: NVIDIA A100, device_count: null, tokens: [A100]}
  - {name: common, device: NVIDIA A10G, device_count: null, tokens: [A10G]}
statements:
  - {about: memory_ratio, strategy: fsdp, relative_to: {strategy: ddp}, low: 0.167, high: 0.25,
     hardware: fast, place: abstract}
  - {about: speedup, strategy: ps-async, relative_to: {strategy: ps-sync}, value: 1.28,
     place: findings}
remarks:
  - {kind: contradiction, text: Something to doubt, place: abstract}
""",
        "other",
    )
    assert paper.summary.endswith("NVIDIA A100; NVIDIA A10G")
