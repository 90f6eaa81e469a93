"""Whatever happens to a trial is its outcome: stored, nothing left behind, the next one runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import shardmark
from shardmark.base.errors import StorageError
from shardmark.base.results.schema import Outcome, TrialResult
from shardmark.base.results.verification import LOGS_FOLDER
from shardmark.bench.launch.session import run_experiment, verify_experiment
from shardmark.experiment.load import from_mapping
from tests import ROOT
from tests.distributed.experiments import experiment
from tests.distributed.misbehaving import CGROUP, CGROUP_BYTES
from tests.kept_engine import KeptEngine
from tests.waiting import wait_for

TRIAL_SECONDS = 10


def descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def none_left_but(before: set[psutil.Process]) -> bool:
    """Tell if no other process is left, after a moment for those that are ending."""
    return not psutil.wait_procs(descendants() - before, timeout=60)[1]


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


REASONS = {
    "killed": (Outcome.FAILED, "rank 1 was ended by SIGKILL"),
    "kills_the_launcher": (Outcome.FAILED, "the launcher was ended by SIGKILL"),
    "hangs": (Outcome.TIMED_OUT, "limits.trial_seconds = 10 s: rank 0 had taken 2 steps"),
    "allocates_too_much": (Outcome.OUT_OF_MEMORY, "rank 1: RuntimeError: "),
    "raises": (Outcome.FAILED, "rank 1: ValueError: the model does not like this picture"),
    "outgrows_its_cgroup": (Outcome.OUT_OF_MEMORY, "the kernel killed rank 1"),
}


@pytest.fixture(scope="module")
def ended(
    tmp_path_factory: pytest.TempPathFactory, cgroup: bool, kept_engine: KeptEngine
) -> dict[str, TrialResult]:
    """Run an experiment in which every trial ends badly."""
    models = [name for name in REASONS if cgroup or "cgroup" not in name]
    names = [f"misbehaving:{name}" for name in models]
    out = tmp_path_factory.mktemp("outcomes") / "run"
    before, held = descendants(), kept_engine.held()
    run_experiment(
        from_mapping(experiment(*names, limits={"trial_seconds": TRIAL_SECONDS})),
        out,
        engine=kept_engine,
    )
    assert none_left_but(before)
    grown = {name: count - held[name] for name, count in kept_engine.held().items()}
    assert max(grown.values()) < len(models), f"a trial leaves something: {grown}"
    trials = shardmark.load(out).trials
    return {str(t.trial["workload"]["model"]).rpartition(":")[2]: t for t in trials}


@pytest.mark.parametrize("model", REASONS)
def test_failure_has_outcome_reason_and_remedy(ended: dict[str, TrialResult], model: str) -> None:
    if model not in ended:
        pytest.skip("making a memory control group needs root and cgroup v1")
    result, (outcome, reason) = ended[model], REASONS[model]
    assert result.outcome is outcome
    assert result.failure is not None
    assert reason in result.failure.reason
    assert not result.metrics
    assert result.failure.remedy


def test_verdict_on_ranks_that_hang_says_where_and_names_their_log(
    tmp_path: Path, kept_engine: KeptEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the log is in the folder of verdicts, below this one
    mapping = experiment("misbehaving:hangs", limits={"trial_seconds": TRIAL_SECONDS})
    made = verify_experiment(from_mapping(mapping), tmp_path / "scratch", engine=kept_engine)
    (cause,) = (verdict.cause for verdict in made.verdicts)
    (log,) = Path().glob(f"runs/.verified/*/{LOGS_FOLDER}/*.txt")
    assert cause is not None
    assert f"look in {log} for the stack" in cause.evidence
    assert re.search(r"rank 1: File .*misbehaving\.py., line \d+ in <lambda>", cause.evidence)
    assert "misbehaving.py" in log.read_text()


def command(out: Path, mapping: dict[str, Any]) -> subprocess.Popen[str]:
    file = out.with_suffix(".yaml")
    file.write_text(json.dumps(mapping))  # JSON is YAML
    return subprocess.Popen(
        [sys.executable, "-m", "shardmark", "run", str(file), "--out", str(out)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_progress(out: Path, *, trials: int) -> None:
    """Until so many trials have begun, and a rank of one under way has said how far it is."""
    wait_for(lambda: len([*out.glob("trials/*")]) >= trials)
    wait_for(lambda: [*out.glob("trials/*/rank-1.progress")])


def test_same_command_finishes_interrupted_and_killed_runs(
    tmp_path: Path, kept_engine: KeptEngine
) -> None:
    """Ctrl-C at a slow step of the second trial; the first one's result is cut in half, as by a
    power failure; the command that goes on is killed; a third one finishes."""
    out, before = tmp_path / "run", descendants()
    mapping = experiment("misbehaving:is_slow", measure={"repeats": 2})
    first = command(out, mapping)
    wait_for_progress(out, trials=2)
    first.send_signal(signal.SIGINT)
    printed, _ = first.communicate(timeout=120)
    assert first.returncode == 130, printed
    assert "Traceback" not in printed
    assert none_left_but(before)
    trials = sorted(shardmark.load(out).trials, key=lambda trial: trial.order)
    assert [trial.outcome for trial in trials] == [Outcome.OK, Outcome.INTERRUPTED]
    victim = out / "trials" / trials[0].id / "result.json"
    victim.write_bytes(victim.read_bytes()[:2000])

    second = command(out, mapping)
    wait_for_progress(out, trials=2)
    family = psutil.Process(second.pid).children(recursive=True)
    assert len(family) >= 4  # fork server, agent, two ranks
    second.kill()
    printed, _ = second.communicate(timeout=120)
    assert "measured again" in printed
    assert not psutil.wait_procs(family, timeout=60)[1]

    run_experiment(from_mapping(mapping), out, engine=kept_engine)
    assert [trial.outcome for trial in shardmark.load(out).trials] == [Outcome.OK] * 2
    assert not shardmark.load(out).damaged


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB, where this user may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_full_disk_is_reported_as_a_storage_error(disk: Path, kept_engine: KeptEngine) -> None:
    """The ranks' own files do not fit; with room, the same command finishes."""
    mapping = experiment(recipe={"steps": 2})
    status, filler = os.statvfs(disk), disk / "filler"
    filler.write_bytes(bytes(status.f_bavail * status.f_frsize - 40 * 1024))
    with pytest.raises(StorageError, match="No space left on device; make room"):
        run_experiment(from_mapping(mapping), disk / "run", engine=kept_engine)
    assert shardmark.load(disk / "run").trials == ()
    filler.unlink()
    full = experiment("misbehaving:fills_the_disk")
    with pytest.raises(StorageError, match="a disk error stopped the trial; make room"):
        run_experiment(from_mapping(full), disk / "full", engine=kept_engine)
    assert shardmark.load(disk / "full").trials == (), "there is room again, but there was none"
    run_experiment(from_mapping(mapping), disk / "run", engine=kept_engine)
    assert [trial.outcome for trial in shardmark.load(disk / "run").trials] == [Outcome.OK]
