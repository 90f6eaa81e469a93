"""A link that becomes slower while a trial runs: nothing is lost, and nothing hangs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from benchmarks.cluster import namespaces
from benchmarks.cluster.bench import Bench, bench

from shardmark.analysis.compare.comparison import compare
from shardmark.analysis.diagnose.stability import warnings_of
from shardmark.results.schema import Outcome, StabilityKind, TrialResult
from shardmark.results.store import load_run
from tests.cluster.needs import why_no_bench
from tests.cluster.one_machine import EXPERIMENT, wait_for
from tests.cluster.test_torchrun import NODE_SECONDS, PORT, command, steps, written
from tests.kept_engine import REPOSITORY

pytestmark = [
    pytest.mark.skipif(why_no_bench() is not None, reason=why_no_bench() or ""),
    pytest.mark.timeout(300),
]

FAST = 200e6
SLOW = FAST / 10
DEAD_SLOW = FAST / 200
"""Bits a second: the gradients take 0.084, 0.84 and 17 s."""
STEPS = 26
TRIAL_SECONDS = 15.0
CHANGES: dict[str, Any] = {
    "workload": EXPERIMENT["workload"] | {"model": "tests.cluster.models:heavy"},
    "recipe": {"global_batch": 16, "steps": STEPS, "threads_per_rank": 1},
    "matrix": {"strategy": ["ddp"]},
    "measure": {"warmup_steps": 2, "evaluate": "never", "verify": False, "probe": False}
    | {"link_seconds": 0},
}
ENDLESS = CHANGES | {
    "recipe": {"global_batch": 16, "steps": 10**6, "threads_per_rank": 1},
    "limits": {"trial_seconds": TRIAL_SECONDS},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One trial over a link that became slower at some step."""

    folder: Path
    codes: list[int]
    seconds_after: float
    """From the change of the link to the end of the trial."""
    left: list[int]
    """Processes on the nodes when the commands had ended."""

    @property
    def trial(self) -> TrialResult:
        (trial,) = load_run(self.folder, verify=True).trials
        return trial


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Run]]:
    """Two benches at once: both wait for their links most of the time.

    The first link becomes ten times slower, the second so slow that no step would end in time.
    """
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.chdir(REPOSITORY)
        changes: tuple[tuple[dict[str, Any], float], ...] = ((CHANGES, SLOW), (ENDLESS, DEAD_SLOW))
        ends = stack.enter_context(ThreadPoolExecutor())
        both = []
        for number, (changed, speed) in enumerate(changes):
            made = stack.enter_context(bench(nodes=2, bits_per_second=FAST))
            folder = tmp_path_factory.mktemp(f"run{number}")
            both.append(ends.submit(finished, made, folder, changed, speed))
        first, second = (one.result() for one in both)
        yield first, second


def finished(nodes: Bench, folder: Path, changes: dict[str, Any], bits_per_second: float) -> Run:
    """The same command on both nodes, to its end; one link is changed on the way."""
    file, out = written(folder, **changes), folder / "run"
    words = command(file, out, f"engine.rendezvous={nodes.nodes[0].address}:{PORT}")
    both = [nodes.start(node, words, log=folder / f"{node}.txt") for node in (0, 1)]
    wait_for(lambda: steps(out, 0) >= STEPS // 2, 200)
    nodes.limit(bits_per_second, nodes=[1])
    changed = time.monotonic()
    wait_for(lambda: any((out / "trials").glob("*/result.json")), 90)
    seconds = time.monotonic() - changed
    codes = [one.wait(timeout=30) for one in both]
    left = [pid for node in nodes.nodes for pid in namespaces.processes(node.namespace)]
    return Run(folder=out, codes=codes, seconds_after=seconds, left=left)


def step_seconds(run: Run, rank: int) -> list[float]:
    file = run.folder / "trials" / run.trial.id / "steps.jsonl"
    lines = map(json.loads, file.read_text().splitlines())
    return [line["step_seconds"] for line in lines if line["measured"] and line["rank"] == rank]


def test_ten_times_slower_is_slower_and_nothing_is_lost(runs: tuple[Run, Run]) -> None:
    """The gradients fill the link for longer than a silent node has; signs of life get through."""
    run, _ = runs
    assert run.trial.outcome is Outcome.OK, run.trial.failure
    assert run.codes == [0, 0]
    assert run.left == []
    for rank in (0, 1):
        seconds = step_seconds(run, rank)
        assert len(seconds) == STEPS - 2
        assert median(seconds[-6:]) > 3 * median(seconds[:6])
        assert sum(seconds[-10:]) > NODE_SECONDS
    warnings = warnings_of(compare([load_run(run.folder)]))
    (drift,) = (one for one in warnings if one.kind is StabilityKind.TRIAL_DRIFT)
    assert drift.place == run.trial.id
    assert "times longer, and stayed so, from about step" in drift.text


def test_too_slow_for_the_trial_is_timed_out(runs: tuple[Run, Run]) -> None:
    """All ranks are ended over the full link, in the middle of a collective."""
    _, run = runs
    assert run.trial.outcome is Outcome.TIMED_OUT
    assert run.codes[0] == 1
    assert run.left == []
    assert run.seconds_after < TRIAL_SECONDS + 10
    assert run.trial.total_seconds < TRIAL_SECONDS + 10
    assert run.trial.failure is not None
    assert "lost" not in run.trial.failure.reason
