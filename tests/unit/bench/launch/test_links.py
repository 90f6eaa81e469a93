"""Links are measured once for a run, stored with it, and never in the way of its trials."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.errors import ShardmarkError
from shardmark.base.results.network import MeasuredOperation, NetworkRecord, TimedSize, read_network
from shardmark.base.results.store import RunFolder, load_run
from shardmark.bench.launch.outcome import Ending
from shardmark.bench.launch.session import run_experiment
from shardmark.ranks.trial import Trial
from tests import present
from tests.unit.bench.launch.fakes import (
    FAILED,
    FINE,
    INTERRUPTED,
    TIMED_OUT,
    FakeEngine,
    RecordingListener,
    experiment,
)

TWO_NODES = ("matrix={strategy: [single, ddp]}", "placement={nodes: 2, ranks_per_node: 1}")
LATENCY, SPEED = 1e-4, 1e8
"""Seconds, and bytes per second, of the invented links."""
SIZES = (1024, 65536, 1048576)


def record(ranks: int) -> NetworkRecord:
    sizes = tuple(TimedSize(payload_bytes=m, seconds=(LATENCY + m / SPEED,) * 3) for m in SIZES)
    return NetworkRecord(
        measured_at_seconds=1.0,
        backend="gloo",
        device_type="cpu",
        hosts=tuple(f"host-{rank}" for rank in range(ranks)),
        interface="eth0",
        torch="2.15",
        operations=(
            MeasuredOperation(
                operation="point_to_point", reach="between_hosts", ranks=(0, 1), sizes=sizes
            ),
        ),
    )


class Linked(FakeEngine):
    """An engine of two nodes, whose ranks leave the timings of links; what they were asked for."""

    def __init__(self, nodes: int = 2, end: Ending | ShardmarkError = FINE) -> None:
        super().__init__(nodes=nodes)
        self.on_links = self.leave
        self.end = end
        self.asked: list[Trial] = []

    def leave(self, directory: Path) -> Ending:
        trial = Trial.model_validate_json((directory / "trial.json").read_text())
        self.asked.append(trial)
        if isinstance(self.end, ShardmarkError):
            raise self.end
        if self.end == FINE:
            text = record(trial.world_size).model_dump_json()
            (directory / "record.json").write_text(text)
        return self.end


def run(out: Path, linked: Linked, *overrides: str) -> list[str]:
    """Return the messages of the run, without those about loading and time."""
    listener = RecordingListener()
    run_experiment(experiment(*overrides), out, listener=listener, engine=linked)
    return [note for note in listener.notes if not note.startswith(("loading torch", "time: "))]


def test_links_between_nodes_are_measured_before_the_trials_and_fitted(tmp_path: Path) -> None:
    linked = Linked()
    notes = run(tmp_path / "run", linked, *TWO_NODES)
    (trial,) = linked.asked
    assert (trial.world_size, trial.nodes, trial.measure.link_seconds) == (2, 2, 8)
    assert linked.calls.index("load cpu") < linked.calls.index("run ddp")
    assert "2 ranks on 2 nodes, about 8 s" in notes[0]
    assert all(fact in notes[1] for fact in ("100 us", "100 MB/s", "between hosts"))
    stored = present(read_network(tmp_path / "run"))
    (operation,) = stored.operations
    assert present(operation.fit).bytes_per_second.value == pytest.approx(SPEED)
    assert not (tmp_path / "run" / ".links").exists()
    assert {trial.outcome for trial in load_run(tmp_path / "run").trials} == {"ok"}


def test_links_are_measured_again_for_more_ranks_or_a_damaged_record(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    run(out, Linked(), *TWO_NODES)
    again = Linked()
    run(out, again, *TWO_NODES, "measure.repeats=2")
    assert not again.asked
    (out / "network.json").write_text("{")
    damaged = Linked()
    notes = run(out, damaged, *TWO_NODES, "measure.repeats=3")
    assert any("network.json" in note and "measured again" in note for note in notes)
    assert len(damaged.asked) == 1
    more = Linked()
    wider = ("matrix={strategy: [ddp]}", "placement={nodes: 2, ranks_per_node: 2}")
    run(out, more, *wider)
    assert [trial.world_size for trial in more.asked] == [4]


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ((), []),
        (("measure.link_seconds=2.5",), [2.5]),
        (("measure.link_seconds=0", *TWO_NODES), []),
    ],
)
def test_links_of_one_node_are_measured_on_request(
    tmp_path: Path, changes: tuple[str, ...], asked: list[float]
) -> None:
    linked = Linked()
    sizes = () if changes[1:] else ("matrix={strategy: [ddp], world_size: [2]}",)
    run(tmp_path / "run", linked, *sizes, *changes)
    assert [trial.measure.link_seconds for trial in linked.asked] == asked


def test_one_process_has_no_links(tmp_path: Path) -> None:
    linked = Linked()
    alone = ("matrix={strategy: [single]}", "measure.link_seconds=2")
    notes = run(tmp_path / "run", linked, *alone)
    assert notes == ["measure.link_seconds: no trial has several ranks, so no links"]
    assert not linked.asked


@pytest.mark.parametrize(
    ("linked", "reason"),
    [
        ({"end": ShardmarkError("node 1 (host-1): cannot import torch")}, "cannot import torch"),
        ({"end": TIMED_OUT}, "timed_out: not done after"),
        ({"end": FAILED}, "failed: "),
        ({"nodes": 1}, "2 nodes are asked for"),
    ],
)
def test_failed_link_measurement_does_not_stop_the_trials(
    tmp_path: Path, linked: dict[str, Any], reason: str
) -> None:
    out = tmp_path / "run"
    notes = run(out, Linked(**linked), *TWO_NODES)
    assert reason in next(note for note in notes if "could not be measured" in note)
    assert reason in RunFolder(out).read_environment()["links_missing"]
    assert read_network(out) is None
    assert "ok" in {trial.outcome for trial in load_run(out).trials}
    assert not (out / ".links").exists()


def test_unavailable_strategy_does_not_prevent_link_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    linked = Linked()
    run(tmp_path / "run", linked, TWO_NODES[1], "matrix={strategy: [zero-1]}")
    assert [trial.strategy.name for trial in linked.asked] == ["ddp"]


def test_an_interrupt_ends_the_run(tmp_path: Path) -> None:
    linked = Linked(end=INTERRUPTED)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", linked, *TWO_NODES)
    assert linked.ran == []
    assert not (tmp_path / "run" / ".links").exists()
