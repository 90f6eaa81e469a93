"""Whichever change of a file fails, or is the last before a kill: nothing that was stored is lost.

`benchmarks/write_faults.py` does it to whole commands, at every system call.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.errors import InputError, StorageError
from shardmark.base.results.store import load_run
from shardmark.bench.launch.session import run_experiment
from tests.unit.bench.launch.fakes import FakeEngine, experiment

CHANGES = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "ftruncate", "pwrite")


class KilledError(BaseException):
    """Nothing is changed any more from here on."""


@contextmanager
def failing(at: int, number: int | None) -> Iterator[list[str]]:
    """The calls that change files, of which that one fails; without a number it and all others."""
    calls: list[str] = []

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **options: Any) -> Any:
            mode = arguments[1] if name == "open" and len(arguments) > 1 else "w"
            if not set(mode) & set("wxa+"):
                return call(*arguments, **options)
            calls.append(name)
            if number is None and len(calls) > at:
                raise KilledError
            if len(calls) == at + 1:
                raise OSError(number, "no more", None)
            return call(*arguments, **options)

        return guarded

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, wrapped(name, getattr(os, name)))
        patch.setattr(io, "open", wrapped("open", io.open))
        yield calls


def finish(out: Path) -> None:
    run_experiment(experiment(), out, engine=FakeEngine())


EVERY = 13
"""Step between the 66 changes of a run that are tested; the benchmark takes each."""


@pytest.mark.parametrize(
    ("number", "first"), [(errno.ENOSPC, 0), (errno.EIO, 4), (None, 8)], ids=["full", "bad", "kill"]
)
def test_disk_errors_lose_no_result(tmp_path: Path, number: int | None, first: int) -> None:
    """The run has a trial that is stored and one that is damaged, and measures that one again."""
    stored = tmp_path / "stored"
    finish(stored)
    (whole,) = stored.glob("trials/single-*")
    (damaged,) = stored.glob("trials/ddp-*/log.txt")
    damaged.write_text("cut")
    content = {path.name: path.read_bytes() for path in whole.iterdir()}
    shutil.copytree(stored, tmp_path / "counted")
    with failing(1_000, None) as calls:
        finish(tmp_path / "counted")
    assert {"open", "rename", "replace", "unlink", "fsync"} <= {*calls}
    for at in range(first, len(calls), EVERY):
        out = tmp_path / f"run-{at}"
        shutil.copytree(stored, out)
        with failing(at, number) as calls, suppress(StorageError, KilledError):
            finish(out)
        left = load_run(out, verify=True)
        assert {p.name: p.read_bytes() for p in (out / "trials" / whole.name).iterdir()} == content
        assert all(trial.outcome == "ok" for trial in left.trials)
        finish(out)
        after = load_run(out, verify=True)
        assert [trial.outcome for trial in after.trials] == ["ok", "ok"], calls[-1]
        assert (after.damaged, after.missing) == ((), ())
        assert not [*out.rglob("*.tmp"), *out.rglob("rank-*")]
        (aside,) = out.glob("set-aside/ddp-*")
        assert (aside / "log.txt").read_text() == "cut"


@pytest.mark.parametrize("name", ["rank-1.json", "steps.jsonl"])
def test_unreadable_file_is_a_storage_error(tmp_path: Path, name: str) -> None:
    out = tmp_path / "run"
    opened: tuple[Callable[..., Any], ...] = (os.open, io.open)
    engine = FakeEngine()
    with pytest.MonkeyPatch.context() as patch:

        def refuse(_: Path) -> None:
            for module, call in zip((os, io), opened, strict=True):
                patch.setattr(module, "open", partial(refusing, call))

        def refusing(call: Callable[..., Any], path: Any, *rest: Any, **options: Any) -> Any:
            if str(path).endswith(name) and not str(*rest[:1]).startswith(("w", "a")):
                raise OSError(errno.EMFILE, "Too many open files", str(path))
            return call(path, *rest, **options)

        engine.on_run = refuse
        with pytest.raises(InputError, match="Too many open files"):
            run_experiment(experiment("matrix.strategy=[ddp]"), out, engine=engine)
    assert load_run(out).trials == ()
    run_experiment(experiment("matrix.strategy=[ddp]"), out, engine=FakeEngine())
    assert [trial.outcome for trial in load_run(out).trials] == ["ok"]
