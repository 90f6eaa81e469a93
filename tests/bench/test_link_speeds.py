"""Runs over links of several speeds as one table, and where the order of strategies changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cluster.__main__ import main
from benchmarks.cluster.link_speeds import (
    markdown,
    read_speeds,
    reversals_of,
    steps_table,
    winners_table,
)

from shardmark.base.errors import InputError
from shardmark.base.results.schema import TrialResult
from tests.golden.invented import (
    EXPERIMENT,
    FIRST_STEP_AT_SECONDS,
    invented_rank,
    invented_trial,
    write_run,
)

BATCH = 64
RATES = {"eth0": 39e6, "lo": 78e6}
"""Bytes per second of each node, over 6.25 s of windows and 39 steps."""
NOISE = (0.99, 1.0, 1.01)
"""Factors of the repeats; the strategies' parts differ a little more."""
ENVIRONMENT: dict[str, Any] = {
    "date": "2026-11-21T12:00:00+00:00",
    "host": "node0",
    "os": "Debian",
    "python": "3.11.7",
    "shardmark": "0.1.0",
    "cpu": {"model": "EPYC", "usable_cores": 2},
    "memory": {"total_bytes": 2**34},
    "cuda": {"devices": []},
    "packages": {"torch": "2.15", "torchvision": "0.29", "deepspeed": "0.19", "numpy": "2.4"},
    "git": {"commit": "0123456789abcdef", "dirty": False},
    "load": {"average": [0.1, 0.1, 0.1]},
}
STEPS = {
    "unlimited": {"ddp": 0.5, "fsdp": 0.9, "fsdp-hybrid": 0.8},
    "10gbit": {"ddp": 0.6, "fsdp": 1.0, "fsdp-hybrid": 0.61},
    "200mbit": {"ddp": 3.0, "fsdp": 6.0, "fsdp-hybrid": 2.0},
}
"""Seconds; at 10gbit two of them are too close to tell."""


def trials(steps: Mapping[str, float], repeats: int = 3) -> Sequence[TrialResult]:
    placed = tuple(invented_rank(rank).model_copy(update={"node": rank // 2}) for rank in range(4))
    spread = {"ddp": (1.0, 1.002, 1.0), "fsdp": (1.001, 1.0, 1.0), "fsdp-hybrid": (1.03, 1.0, 0.98)}
    return [
        invented_trial(
            strategy,
            4,
            repeat,
            metrics={
                "samples_per_second": BATCH / (s * NOISE[repeat] * spread[strategy][repeat]),
                "network_sent_bytes": 2 * sum(RATES.values()) * 6.25,
            },
            ranks=placed,
        )
        for strategy, s in steps.items()
        for repeat in range(repeats)
    ]


def write_speed(folder: Path, name: str, made: Sequence[TrialResult], repeats: int = 3) -> None:
    lines: list[dict[str, Any]] = [
        {
            "node": node,
            "at_seconds": FIRST_STEP_AT_SECONDS + at,
            "ranks": [{"rank": 2 * node, "pid": node, "cpu_seconds": 0.0}],
            "network": {
                name: {"bytes_sent": at * rate, "bytes_received": at * rate}
                for name, rate in RATES.items()
            },
        }
        for at in (number / 4 for number in range(-4, 40))
        for node in (0, 1)
    ]
    wanted = EXPERIMENT | {
        "matrix": {"strategy": ["ddp", "fsdp", "fsdp-hybrid"]},
        "placement": {"nodes": 2, "ranks_per_node": 2},
        "measure": {"repeats": repeats},
    }
    write_run(
        folder / name,
        made,
        experiment=wanted,
        environment=ENVIRONMENT,
        samples=lambda _: lines,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three finished runs; whoever adds to them takes a copy."""
    folder = tmp_path_factory.mktemp("speeds")
    for name, steps in STEPS.items():
        write_speed(folder, name, trials(steps))
    return folder


def test_speeds_and_strategies_are_sorted(runs: Path) -> None:
    speeds = read_speeds(runs)
    assert [speed.name for speed in speeds] == ["unlimited", "10gbit", "200mbit"]
    assert all(speed.complete for speed in speeds)
    assert list(speeds[0].cells) == ["ddp", "fsdp-hybrid", "fsdp"]
    assert list(speeds[2].cells) == ["fsdp-hybrid", "ddp", "fsdp"]
    cell = speeds[2].cells["ddp"]
    assert cell.step.value == pytest.approx(3.0, rel=1e-2)
    # Two nodes' 39 MB/s over 6.25 s of 39 steps of four ranks.
    assert cell.between_nodes_bytes == pytest.approx(2 * 39e6 * 6.25 / 39 / 4)


def test_a_reversal_needs_a_shown_difference_at_both_speeds(runs: Path) -> None:
    """The close pair shows no difference at 10gbit, so the reversal is at the next speed."""
    speeds = read_speeds(runs)
    assert speeds[1].faster("ddp", "fsdp-hybrid") is None
    (turn,) = reversals_of(speeds)
    assert (turn.first, turn.second) == ("ddp", "fsdp-hybrid")
    assert (turn.before, turn.after) == ("unlimited", "200mbit")
    fastest = {row[0]: (row[1].partition(",")[0], row[2]) for row in winners_table(speeds).rows}
    assert fastest["unlimited"] == ("ddp", "none")
    assert fastest["10gbit"] == ("ddp", "fsdp-hybrid")
    assert fastest["200mbit"] == ("fsdp-hybrid", "none")


def test_one_repeat_shows_no_reversal(tmp_path: Path) -> None:
    for name, steps in STEPS.items():
        write_speed(tmp_path, name, trials(steps, repeats=1), repeats=1)
    speeds = read_speeds(tmp_path)
    assert reversals_of(speeds) == []
    assert "No pair of strategies is shown" in markdown(speeds, [])


def test_incomplete_runs_are_named(runs: Path, tmp_path: Path) -> None:
    runs = Path(shutil.copytree(runs, tmp_path / "runs"))
    write_speed(runs, "1gbit", [*trials({"ddp": 1.0}, repeats=2)])
    (runs / "100mbit" / "trials" / "begun").mkdir(parents=True)
    speeds = read_speeds(runs)
    assert [speed.name for speed in speeds] == ["unlimited", "10gbit", "1gbit", "200mbit"]
    text = markdown(speeds, reversals_of(speeds))
    assert "**Not complete, trials: 1gbit (2 of 9).**" in text
    table = {row[0]: row[1:] for row in steps_table(speeds).rows}
    assert table["fsdp"][2] == "-"
    assert table["ddp"][2].startswith("0.99")
    assert table["fsdp-hybrid"][3].endswith("(1)")


def test_links_table_writes_json_and_markdown(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["links-table", str(runs), "--out", str(out)]) == 0
    stem = "2026-11-21-link-speeds"
    assert {path.name for path in out.iterdir()} == {f"{stem}.json", f"{stem}.md"}
    stored = json.loads((out / f"{stem}.json").read_text())
    assert stored["turns"] == [
        {"first": "ddp", "second": "fsdp-hybrid", "before": "unlimited", "after": "200mbit"}
    ]
    assert "node0" not in json.dumps(stored["machine"])
    assert stored["versions"]["torch"] == "2.15"
    first = stored["speeds"][0]
    assert (first["gigabits_per_second"], first["trials"], first["planned"]) == (None, 9, 9)
    assert set(first["strategies"]["ddp"]["step_seconds_by_repeat"]) == {"0", "1", "2"}
    text = (out / f"{stem}.md").read_text()
    assert "at 200mbit fsdp-hybrid is faster by" in text
    assert "0123456789" in text
    assert text.startswith("# Strategies over links of 3 speeds\n")
    assert "ranks_per_node: 2" in text
    assert f"`python -m benchmarks.cluster links-table {runs.name}`" in text
    assert str(runs) not in text
    printed = capsys.readouterr().out
    assert text.split("\n\n")[1] in printed


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no folder"):
        read_speeds(tmp_path / "nowhere")
    with pytest.raises(InputError, match="holds no run"):
        read_speeds(tmp_path)
    write_run(tmp_path / "quick", [])
    with pytest.raises(InputError, match="/quick: is a folder that is not named by a link speed"):
        read_speeds(tmp_path)
    assert main(["links-table", str(tmp_path)]) == 2
