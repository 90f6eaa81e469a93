"""`doctor --network` without ranks: its options, what it prints, what it stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardmark.cli import main
from shardmark.core.errors import ShardmarkError
from shardmark.measure.network import probe as network_probe
from shardmark.results.network import NetworkRecord, read_network
from tests.golden.test_golden import GOLDEN

REAL_PROBE = network_probe.probe_network
STORED = NetworkRecord.model_validate_json((GOLDEN / "network.json").read_bytes())


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the probe was asked for; it answers with the stored record, its fits taken off."""
    calls: list[dict[str, Any]] = []
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def probe(ranks: int, **options: Any) -> NetworkRecord:
        calls.append({"ranks": ranks, **options})
        bare = tuple(one.model_copy(update={"fit": None}) for one in STORED.operations)
        return STORED.model_copy(update={"operations": bare})

    monkeypatch.setattr(network_probe, "probe_network", probe)
    return calls


def test_text(asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--network"]) == 0
    assert asked == [{"ranks": 2, "device": "auto", "seconds": network_probe.DEFAULT_SECONDS}]
    text = capsys.readouterr().out
    assert "Links between 2 ranks, gloo" in text
    assert "gloo over eth0 on 2 hosts (node0, node1), torch 2.11.0." in text
    assert "No fit of reduce_scatter (between hosts): fewer than 3 sizes were measured." in text
    line = next(line for line in text.splitlines() if line.startswith("point to point"))
    assert "100.00 (" in line
    assert "120.0 (" in line


def test_json_and_stored_with_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trials").mkdir()
    assert main(["doctor", "--network", "--format", "json", "--run", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["operations"][0]["fit"]["bytes_per_second"]["value"] == pytest.approx(1.2e8)
    stored = read_network(tmp_path)
    assert stored is not None
    assert stored.model_dump(mode="json") == printed


def test_as_many_as_an_experiment_has(tmp_path: Path, asked: list[dict[str, Any]]) -> None:
    """Three workers and two servers."""
    path = tmp_path / "experiment.yaml"
    path.write_text(
        "name: x\nworkload: {name: classification, model: resnet18, dataset: digits}\n"
        "recipe: {global_batch: 12, steps: 1}\n"
        "matrix: {strategy: [ddp, {name: ps-sync, servers: 2}], world_size: [2, 3]}\n"
    )
    assert main(["doctor", "--network", "--for", str(path)]) == 0
    assert asked[0]["ranks"] == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "tpu"), "--device: found 'tpu'; allowed are auto, cuda, cpu"),
        (("--seconds", "0"), "--seconds: found 0"),
        (("--run", "nowhere"), "--run nowhere: is no run's folder"),
        (("--ranks", "2", "--for", "quickstart"), "--ranks, --for: both are given"),
    ],
)
def test_wrong_options(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--network", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--ranks", "3"), "--ranks"),
        (("--device", "cpu", "--for", "quickstart"), "--for, --device"),
        (("--run", "nowhere", "--seconds", "1"), "--run, --seconds"),
    ],
)
def test_options_of_network_are_not_ignored_without_it(
    options: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *options]) == 2
    said = f"{named}: found without --network; add --network, or leave this out"
    assert said in capsys.readouterr().err


def test_under_torchrun_it_says_how_many(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert main(["doctor", "--network", "--ranks", "2"]) == 2
    assert "found under torchrun" in capsys.readouterr().err


def test_too_few_or_too_many_ranks() -> None:
    for ranks in (1, 257):
        with pytest.raises(ShardmarkError, match=f"found {ranks}; allowed are 2 to 256"):
            REAL_PROBE(ranks)
