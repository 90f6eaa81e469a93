"""Stored results are read back as they were; damaged ones are reported, never half-believed."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from shardmark.base.errors import InputError
from shardmark.base.files.stored import Stored
from shardmark.base.results.network import NETWORK_FILE, NetworkRecord, read_network
from shardmark.base.results.schema import Failure, Outcome, RankError
from shardmark.base.results.store import RunFolder, load_run
from shardmark.base.results.verification import VERIFICATION_FILE, Verification
from tests.golden.invented import EXPERIMENT, invented_rank, invented_trial, write_run


@pytest.fixture
def result_file(run: Path) -> Path:
    return run / "trials" / "ddp-2-1" / "result.json"


def only_damage(run: Path, *, verify: bool = False) -> str:
    """The reason of the one damaged trial; the other one must be unharmed."""
    stored = load_run(run, verify=verify)
    assert [trial.id for trial in stored.trials] == ["ddp-2-0"]
    assert [damaged.path.parent.name for damaged in stored.damaged] == ["ddp-2-1"]
    return stored.damaged[0].reason


def test_stored_results_are_read_back(tmp_path: Path) -> None:
    """The trial has every field that a trial can have, errors of ranks included."""
    error = RankError(kind="exception", message="line 1\nline 2: ünïcode", at_seconds=1.5)
    rank = invented_rank(1).model_copy(update={"error": error, "probe": None})
    failure = Failure(reason="rank 1 failed", rank=1)
    ranks = (invented_rank(0), rank)
    trial = invented_trial(outcome=Outcome.FAILED, failure=failure, ranks=ranks)
    write_run(tmp_path / "run", [trial])
    (stored,) = load_run(tmp_path / "run", verify=True).trials
    assert stored.model_copy(update={"files": {}}) == trial
    assert set(stored.files) == {"steps.jsonl", "samples.jsonl", "log.txt"}
    assert stored.files["log.txt"].size_bytes == len("[rank 0] invented\n")


def test_run_is_named_by_its_trials_and_ordered_as_run(tmp_path: Path) -> None:
    trials = [invented_trial(repeat=0, order=7), invented_trial(repeat=1, order=3)]
    stored = load_run(write_run(tmp_path / "run", trials))
    assert stored.name == "invented"
    assert [trial.order for trial in stored.trials] == [3, 7]
    assert load_run(write_run(tmp_path / "empty", [])).name == "empty"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not whole JSON"),
        (b'{"id": "ddp-2-1"', "is not whole JSON"),
        (b"\x00\xff\xfe garbage", "is not whole JSON"),
        (b"[" * 100_000, "is not whole JSON"),
        (b"[1, 2]", "found [1, 2]"),
        (b"{}", "Field required (and "),
        (None, "cannot be read: it is no regular file"),
    ],
)
def test_garbled_result_is_damaged(
    run: Path, result_file: Path, content: bytes | None, reason: str
) -> None:
    if content is None:
        result_file.unlink()
        result_file.mkdir()
    else:
        result_file.write_bytes(content)
    assert reason in only_damage(run)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema_version": 99, "new": 1}, "schema_version is 99, of a newer shardmark"),
        ({"schema_version": -1}, "schema_version: found -1"),
        ({"outcome": "splendid"}, "outcome: found 'splendid'; .*'ok', 'out_of_memory'"),
        ({"surprise": "x" * 100}, "surprise: found 'xxx.{50,56}[.]{3};"),
        ({"id": "another"}, "belongs to another trial: its id is 'another'"),
        ({"ranks": []}, "its outcome is ok, but no rank that trains is in it"),
        ({"trial": {"workload": "classification"}}, "trial.workload is no mapping"),
        ({"trial": {"world_size": 4}}, "trial.world_size is 4, but world_size is 2"),
    ],
)
def test_invalid_result_is_damaged(
    run: Path, result_file: Path, change: dict[str, Any], reason: str
) -> None:
    document = json.loads(result_file.read_text())
    result_file.write_text(json.dumps(document | change))
    assert re.match(reason, only_damage(run))


@pytest.mark.parametrize("name", ["steps.jsonl", "samples.jsonl", "log.txt"])
def test_changed_raw_file_is_damaged(run: Path, result_file: Path, name: str) -> None:
    """`compare` looks at the size only; finishing a run looks at the content."""
    path = result_file.with_name(name)
    content, size_bytes = path.read_bytes(), path.stat().st_size
    path.write_bytes(content[::-1])
    assert not load_run(run).damaged
    assert only_damage(run, verify=True).startswith(f"{name} has changed since it was recorded")
    path.write_bytes(content[:-1])
    assert only_damage(run) == f"{name} has {size_bytes - 1} bytes, not the recorded {size_bytes}"
    path.unlink()
    assert only_damage(run) == f"{name} is missing"


def test_metric_that_is_not_finite_is_stored_as_missing(tmp_path: Path) -> None:
    trial = invented_trial(metrics={"train_loss": math.nan, "validation_loss": math.inf})
    (stored,) = load_run(write_run(tmp_path / "run", [trial])).trials
    assert stored.metrics["train_loss"] is None
    assert stored.missing["train_loss"] == "not a finite number (nan)"
    assert stored.missing["validation_loss"] == "not a finite number (inf)"
    text = (tmp_path / "run/trials/ddp-2-0/result.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_unreadable_result_is_not_written(tmp_path: Path) -> None:
    broken = invented_trial().model_copy(update={"total_seconds": math.nan})
    folder = RunFolder.create(tmp_path / "run")
    with pytest.raises(ValidationError, match="total_seconds"):
        folder.write_result(broken)
    assert folder.read().missing == ("ddp-2-0",)


def made_unreadable(how: str, path: Path, patch: pytest.MonkeyPatch) -> None:
    """Make a whole file one of a newer version, or one that cannot be read for the moment."""
    if how == "newer":
        newer = json.loads(path.read_text()) | {"schema_version": 2, "new": 1}
        path.write_text(json.dumps(newer))
        return
    opened = os.open

    def refuse(name: Any, *arguments: Any, **options: Any) -> int:
        if name == path:
            raise OSError(getattr(errno, how), "not now", str(path))
        return opened(name, *arguments, **options)

    patch.setattr(os, "open", refuse)


PASSING = ("EIO", "EMFILE")


@pytest.mark.parametrize(
    ("how", "name"),
    [("newer", "result.json"), *product(PASSING, ("result.json", "steps.jsonl"))],
)
def test_newer_or_unreadable_result_is_refused_and_others_are_shown(
    run: Path, result_file: Path, monkeypatch: pytest.MonkeyPatch, how: str, name: str
) -> None:
    made_unreadable(how, result_file.with_name(name), monkeypatch)
    with pytest.raises(InputError, match=r"of a newer shardmark|cannot be read: not now"):
        RunFolder(run).read_result("ddp-2-1", verify=True)
    assert re.search(r"newer shardmark|not now", only_damage(run))


@pytest.mark.parametrize("how", ["newer", *PASSING])
@pytest.mark.parametrize(
    ("model", "name"), [(Verification, VERIFICATION_FILE), (NetworkRecord, NETWORK_FILE)]
)
def test_newer_or_unreadable_file_is_refused_and_damaged_one_set_aside(
    run: Path, monkeypatch: pytest.MonkeyPatch, how: str, model: type[Stored], name: str
) -> None:
    notes: list[str] = []
    assert RunFolder(run).read_or_set_aside(model, name, notes.append) is None
    (run / name).write_text("{")
    assert RunFolder(run).read_or_set_aside(model, name, notes.append) is None
    assert "measured again" in notes[0]
    assert (run / "set-aside" / f"{name}.damaged-1").read_text() == "{"
    (run / name).write_text("{}")
    made_unreadable(how, run / name, monkeypatch)
    with pytest.raises(InputError, match=r"of a newer shardmark|cannot be read: not now"):
        RunFolder(run).read_or_set_aside(model, name, notes.append)
    assert (len(notes), load_run(run).verification) == (1, None)


@pytest.mark.parametrize("content", ["{", '{"speed": 1}', '{"schema_version": 99}', None])
def test_a_network_that_cannot_be_read_is_named(run: Path, content: str | None) -> None:
    assert read_network(run) is None
    if content is None:
        (run / NETWORK_FILE).mkdir()
    else:
        (run / NETWORK_FILE).write_text(content)
    with pytest.raises(InputError, match=NETWORK_FILE):
        read_network(run)


def test_experiment_is_read_back(run: Path) -> None:
    """Small numbers as numbers and words as words, which plain YAML confuses."""
    experiment = EXPERIMENT | {"name": "ünïcode", "device": "no", "limits": {"x": [None, 1e-07]}}
    RunFolder(run).write_experiment(experiment)
    assert RunFolder(run).read_experiment() == experiment


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- 1\n", "holds no mapping"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"a: [", "experiment.yaml, line"),
    ],
)
def test_broken_experiment_is_refused(run: Path, content: bytes, message: str) -> None:
    (run / "experiment.yaml").write_bytes(content)
    with pytest.raises(InputError, match=message):
        RunFolder(run).read_experiment()


def test_other_folders_are_refused_with_the_runs_nearby(run: Path, tmp_path: Path) -> None:
    assert len(RunFolder.create(run).read().trials) == 2, "a run is taken up"
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("gone")
    for create, path, message in (
        (RunFolder.create, "file", "is a file"),
        (RunFolder.create, "file/below", "file is a file"),
        (RunFolder.create, "dangling", "is a link to nowhere"),
        (RunFolder.create, "", "holds other files and no run"),
        (load_run, "rum", f"rum: does not exist; .* for example {run}"),
        (load_run, "", f"is no run folder; .* for example {run}"),
        (load_run, "no/where", r"does not exist; .* as `shardmark run --out DIR` writes"),
    ):
        with pytest.raises(InputError, match=message):
            create(tmp_path / path)


@pytest.mark.parametrize("moved", range(1, 4))
def test_run_is_moved_aside_completely_after_a_kill(
    run: Path, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    folder, names = RunFolder(run), {path.name for path in run.iterdir()}
    rename, calls = Path.rename, list[Path]()

    def killed(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) > moved:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        folder.set_run_aside()
    RunFolder.create(run)  # as the next command does
    if (run / "experiment.yaml").exists():
        folder.set_run_aside()
    assert {path.name for path in (run / "set-aside").iterdir()} == {"run-1"}
    assert {path.name for path in (run / "set-aside" / "run-1").iterdir()} == names
    (run / "experiment.yaml").write_text("{}")
    assert folder.set_run_aside().name == "run-2", "a whole run is not added to"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_lock_that_is_no_file_is_reported(run: Path, make: Callable[[Path], None]) -> None:
    make(run / ".lock")
    with pytest.raises(InputError, match=r"\.lock: is no regular file; remove it"):
        RunFolder(run).locked(print).__enter__()


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_temporarily_unreadable_files_are_not_replaced(
    run: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(path: Path, *_: object) -> bytes:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("shardmark.base.results.store.read_regular", refuse)
    folder = RunFolder(run)
    with pytest.raises(InputError, match="run again when it can be read"):
        folder.read_experiment()
    with pytest.raises(InputError, match="run again when it can be read"):
        folder.read_environment(now=True)
    assert folder.read_environment() == {}


def test_file_system_without_locks_is_reported(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    told: list[str] = []
    with RunFolder(run).locked(told.append):
        pass
    (note,) = told
    assert "No locks available" in note
