"""Whatever happens to a trial is its outcome: stored, nothing left behind, the next one runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import shardmark
from shardmark.config.load import from_mapping
from shardmark.launch.controller import run_experiment
from shardmark.results.schema import Outcome, TrialResult
from tests.distributed.misbehaving import CGROUP, CGROUP_BYTES

REPOSITORY = Path(__file__).parents[2]
MODELS = ("killed", "crashes", "hangs", "allocates_too_much", "has_no_memory", "raises")
TRIAL_SECONDS = 15
# Verification would meet the misbehaving model first.
MEASURE = {"warmup_steps": 1, "sample_seconds": 0.1, "evaluate": "never", "verify": False}


def experiment(*models: str, **changes: Any) -> dict[str, Any]:
    names = [f"tests.distributed.misbehaving:{name}" for name in models]
    return {
        "name": "outcomes",
        "workload": {"name": "classification", "model": names[0], "dataset": "digits"},
        "recipe": {"global_batch": 16, "steps": 6},
        "matrix": {"strategy": ["ddp"], "world_size": [2], "workload.model": names},
        "measure": MEASURE,
        "limits": {"trial_seconds": TRIAL_SECONDS},
        "device": "cpu",
    } | changes


def by_model(trials: tuple[TrialResult, ...]) -> dict[str, TrialResult]:
    return {str(t.trial["workload"]["model"]).rpartition(":")[2]: t for t in trials}


def of_a_run(process: psutil.Process) -> bool:
    """Not Python's own helpers, which earlier tests that start ranks have started."""
    try:
        return "from multiprocessing." not in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def descendants() -> set[psutil.Process]:
    return set(filter(of_a_run, psutil.Process().children(recursive=True)))


def none_left_but(before: set[psutil.Process]) -> bool:
    """Whether nobody else is left, a moment being granted to those that are on their way out."""
    deadline = time.monotonic() + 5
    while descendants() - before:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture(scope="module")
def cgroup() -> Iterator[bool]:
    """A control group with little memory, where this user may make one."""
    try:
        CGROUP.mkdir()
        (CGROUP / "memory.limit_in_bytes").write_text(str(CGROUP_BYTES))
    except OSError:
        yield False
        return
    yield True
    CGROUP.rmdir()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, cgroup: bool) -> dict[str, TrialResult]:
    """One run in which every trial but the last ends badly."""
    models = [*MODELS, *(["outgrows_its_cgroup"] if cgroup else [])]
    out = tmp_path_factory.mktemp("outcomes") / "run"
    before = descendants()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)  # where the user's models are
        run_experiment(from_mapping(experiment(*models)), out)
    assert none_left_but(before)
    return by_model(shardmark.load(out).trials)


@pytest.mark.parametrize(
    ("model", "outcome", "reason"),
    [
        ("killed", Outcome.FAILED, "rank 1 was ended by SIGKILL"),
        ("crashes", Outcome.FAILED, "rank 1 was ended by SIGSEGV"),
        ("hangs", Outcome.TIMED_OUT, "limits.trial_seconds = 15 s: rank 0 had taken 2 steps"),
        ("allocates_too_much", Outcome.OUT_OF_MEMORY, "rank 1: RuntimeError: "),
        ("has_no_memory", Outcome.OUT_OF_MEMORY, "rank 1: MemoryError: no memory left for a list"),
        ("raises", Outcome.FAILED, "rank 1: ValueError: the model does not like this picture"),
    ],
)
def test_each_end_has_its_outcome(
    ended: dict[str, TrialResult], model: str, outcome: Outcome, reason: str
) -> None:
    result = ended[model]
    assert result.outcome is outcome
    assert result.failure is not None
    assert reason in result.failure.reason
    assert not result.metrics
    assert result.failure.remedy
    limit = TRIAL_SECONDS + 8 if model == "hangs" else TRIAL_SECONDS
    assert result.total_seconds < limit


def test_the_kernel_killing_a_rank_for_memory_is_out_of_memory(
    ended: dict[str, TrialResult], cgroup: bool
) -> None:
    if not cgroup:
        pytest.skip("making a memory control group needs root and cgroup v1")
    result = ended["outgrows_its_cgroup"]
    assert result.outcome is Outcome.OUT_OF_MEMORY
    assert result.failure is not None
    assert "the kernel killed rank 1" in result.failure.reason


def command(out: Path, mapping: dict[str, Any]) -> subprocess.Popen[str]:
    file = out.with_suffix(".yaml")
    file.write_text(json.dumps(mapping))  # JSON is YAML
    return subprocess.Popen(
        [sys.executable, "-m", "shardmark", "run", str(file), "--out", str(out)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_progress(out: Path, *, trials: int = 1, seconds: float = 120) -> None:
    """Until so many trials have begun, and a rank of one under way has said how far it is."""
    deadline = time.monotonic() + seconds
    while len(list(out.glob("trials/*"))) < trials or not list(
        out.glob("trials/*/rank-1.progress")
    ):
        assert time.monotonic() < deadline, "no such trial began"
        time.sleep(0.1)


@pytest.mark.timeout(240)
def test_interrupting_stores_it_and_the_same_command_finishes(tmp_path: Path) -> None:
    """Ctrl-C at a slow step of the second trial, and the first one's result cut in half as by a
    power failure; then the same again."""
    out, before = tmp_path / "run", descendants()
    mapping = experiment("is_slow", measure=MEASURE | {"repeats": 2})
    first = command(out, mapping)
    wait_for_progress(out, trials=2)
    time.sleep(1)
    first.send_signal(signal.SIGINT)
    began = time.monotonic()
    printed, _ = first.communicate(timeout=30)
    assert time.monotonic() - began < 10
    assert first.returncode == 130, printed
    assert "Traceback" not in printed
    assert none_left_but(before)
    trials = sorted(shardmark.load(out).trials, key=lambda trial: trial.order)
    assert [trial.outcome for trial in trials] == [Outcome.OK, Outcome.INTERRUPTED]

    victim = out / "trials" / trials[0].id / "result.json"
    victim.write_bytes(victim.read_bytes()[:2000])
    second = command(out, mapping)
    printed, _ = second.communicate(timeout=120)
    assert second.returncode == 0, printed
    assert "measured again" in printed
    assert [trial.outcome for trial in shardmark.load(out).trials] == [Outcome.OK] * 2
    assert not shardmark.load(out).damaged


@pytest.mark.timeout(120)
def test_a_killed_controller_leaves_no_process(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = command(out, experiment("hangs"))
    wait_for_progress(out)
    family = psutil.Process(first.pid).children(recursive=True)
    assert len(family) >= 4  # fork server, agent, two ranks
    first.kill()
    first.communicate(timeout=30)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
