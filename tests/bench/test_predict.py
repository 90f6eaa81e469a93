"""Published rows become cases, or say why not, and are scored as the model would have it."""

from __future__ import annotations

import csv
from math import exp
from pathlib import Path

import pytest
from benchmarks.predict import all_scores, other_cards, scale_out
from benchmarks.published import COLUMNS, read

from shardmark.predict.timing import Constants

ROW = {
    "source": "invented",
    "model": "ResNet-50",
    "params_b": "0.0256",
    "task": "classification ImageNet",
    "seq_len_or_image": "224x224",
    "micro_batch": "64",
    "precision": "amp",
    "strategy": "DDP",
    "gpu": "V100-SXM2-16GB",
    "gpus_per_node": "8",
    "interconnect": "NVLink; 100 Gb/s EDR",
    "throughput_unit": "img/s",
    "notes": "worker=8 sections are data-loader bound; section: DALI, worker=48",
}


def written(folder: Path, *rows: dict[str, str]) -> Path:
    file = folder / "cases.csv"
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows({"id": str(n), **ROW, **row} for n, row in enumerate(rows))
    return file


def test_a_series_is_predicted_from_its_smallest_run(tmp_path: Path) -> None:
    rates = {"1": "800", "8": "6000", "16": "11000"}
    rows = [{"n_gpus": ranks, "throughput_value": rate} for ranks, rate in rates.items()]
    other = {"n_gpus": "1", "gpu": "A100-80GB", "throughput_value": "1600"}
    cases, refused = read(written(tmp_path, *rows, other))
    assert not refused
    assert (cases[2].nodes, cases[2].node.network_bytes_per_second) == (2, 12.5e9)
    assert cases[2].seconds == pytest.approx(16 * 64 / 11000)
    scores = all_scores(scale_out(cases), Constants())
    assert [(p.anchor.ranks, p.target.ranks, p.kind) for p in scores] == [
        (1, 8, "more ranks"),
        (1, 16, "more nodes"),
    ]
    for pair, score in scores.items():
        predicted = pair.target.seconds / exp(score.residual)
        assert predicted > pair.anchor.seconds  # sharing gradients costs something
        assert score.error == pytest.approx(abs(pair.target.seconds / predicted - 1))
        own = pair.target.samples_per_second
        assert score.naive == pytest.approx(abs(pair.anchor.samples_per_second / own - 1))
    assert {pair.kind for pair in other_cards(cases)} == {"another card"}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"throughput_value": ""}, "no speed"),
        ({"n_gpus": ""}, "number of GPUs"),
        ({"gpu": "Cray-1"}, "card is not stated"),
        ({"strategy": "DDP, TP2"}, "divides layers"),
        ({"strategy": "DDP + CPU offload"}, "offloads, which ddp does not"),
        ({"throughput_unit": "s/epoch"}, "samples of an epoch"),
        ({"throughput_unit": "furlongs"}, "its speed is in furlongs"),
        ({"notes": ROW["notes"].replace("48", "8")}, "data loader"),
        ({"model": "secret", "params_b": ""}, "size is not stated"),
    ],
)
def test_rows_that_say_too_little_are_named(
    tmp_path: Path, changed: dict[str, str], reason: str
) -> None:
    whole = {"n_gpus": "8", "throughput_value": "1"}
    cases, refused = read(written(tmp_path, whole, {**whole, **changed}))
    assert [case.row["id"] for case in cases] == ["0"]
    assert len(refused) == 1
    assert refused[0][0] == "1"
    assert reason in refused[0][1]
