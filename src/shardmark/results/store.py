"""The folder of a run: written so that nothing is ever half there, read so that damage is told."""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from shardmark.core.errors import InputError
from shardmark.core.run_files import JOB_FOLDER, LOG_FILE, RESULT_FILE, SAMPLES_FILE, STEPS_FILE
from shardmark.core.storage import storage_error
from shardmark.results.bounds import check_bounds
from shardmark.results.files import (
    LASTING,
    ModelT,
    check_record,
    check_values,
    file_record,
    flush_folder,
    not_now,
    read_if_there,
    read_model,
    read_regular,
    write_whole,
)
from shardmark.results.fingerprint import FINGERPRINT_FILE, Fingerprint
from shardmark.results.network import NETWORK_FILE
from shardmark.results.runs_folder import LOCK_FILE, point_latest_to
from shardmark.results.schema import Outcome, TrialResult
from shardmark.results.verification import (
    VERIFICATION_FILE,
    Verification,
    read_verification,
)

EXPERIMENT_FILE = "experiment.yaml"
ENVIRONMENT_FILE = "environment.json"
LINKS_REASON = "links_missing"
"""In `environment.json`: why links were to be measured and were not."""
TRIALS_FOLDER = "trials"
ASIDE_FOLDER = "set-aside"
"""What was measured and is no result of the run any more."""
RUN_FILES = (
    TRIALS_FOLDER,  # first: what a crash leaves behind is then no result
    *(VERIFICATION_FILE, NETWORK_FILE, FINGERPRINT_FILE, ENVIRONMENT_FILE, EXPERIMENT_FILE),
)
RECORDED_FILES = (STEPS_FILE, SAMPLES_FILE, LOG_FILE)


@dataclass(frozen=True, slots=True)
class Damaged:
    """A stored trial that must not be believed."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """What a run folder holds."""

    path: Path
    trials: tuple[TrialResult, ...]
    """In the order in which they were run."""
    twins: tuple[TrialResult, ...] = ()
    """Trials whose initial weights were changed by one rounding: no repeats."""
    strategies: tuple[str, ...] = ()
    """Names in the order of the experiment's matrix; none where it cannot be read."""
    damaged: tuple[Damaged, ...] = ()
    missing: tuple[str, ...] = ()
    """Ids of trials that were begun and left no result."""
    verification: Verification | None = None
    """Whether the strategies train the same thing; None where that was not verified."""
    fingerprint: Fingerprint | None = None
    """What it trained, as content; None where that is not told, or cannot be read."""

    @property
    def name(self) -> str:
        """The experiment's name; the folder's where no trial tells."""
        for result in self.trials:
            return str(result.trial.get("experiment", self.path.name))
        return self.path.name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's folder.  The files are the truth: nothing is kept in memory."""

    path: Path

    @staticmethod
    def check(path: Path) -> None:
        """Raise `InputError` if no run could be made or taken up there."""
        if not path.exists():
            if path.is_symlink():
                raise InputError(str(path), "is a link to nowhere", "name a folder")
            return
        if not path.is_dir():
            raise InputError(str(path), "is a file", "name a new folder, or one of a run")
        begun = is_run(path) or (path / ASIDE_FOLDER).is_dir()
        if not begun and any(path.iterdir()):
            raise InputError(
                str(path), "holds other files and no run", "name a new or empty folder"
            )
        refuse_links(path)

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """Make the folder, or take up the run that is there; refuse a folder of something else."""
        cls.check(path)
        try:
            (path / TRIALS_FOLDER).mkdir(parents=True, exist_ok=True)
            flush_folder(path)
        except OSError as error:
            raise storage_error(path, error) from error
        point_latest_to(path)
        return cls(path)

    @contextmanager
    def locked(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Keep other commands from running trials into the folder; `InputError` while one does.

        Where locks do not work, that is told.
        """
        lock = self.path / LOCK_FILE
        if lock.exists() and not lock.is_file():
            raise InputError(str(lock), "is no regular file", "remove it")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(lock, flags, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 300, 0).decode(errors="replace")
                found = f"another command runs trials into it: {holder}"
                raise InputError(str(self.path), found, "wait, or name another --out") from None
            except OSError as error:
                why = f"{lock} cannot be locked: {error.strerror or error}"
                tell(f"{why}; run no other command into this folder meanwhile")
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)
            for left in (p for name in RUN_FILES for p in self.path.glob(f".{name}.*.tmp")):
                left.unlink()  # its command was killed
            yield
        finally:
            os.close(descriptor)

    def write_experiment(self, experiment: Mapping[str, Any]) -> None:
        """Store the resolved experiment."""
        from shardmark.core.strict_yaml import format_yaml

        write_whole(self.path / EXPERIMENT_FILE, format_yaml(dict(experiment)).encode())

    def read_experiment(self) -> dict[str, Any]:
        """The resolved experiment.  Raises `InputError` where the file is missing or broken."""
        from shardmark.core.strict_yaml import MAX_CHARACTERS, parse_yaml

        path = self.path / EXPERIMENT_FILE
        try:
            text = read_regular(path, MAX_CHARACTERS).decode()
        except (OSError, UnicodeDecodeError) as error:
            if isinstance(error, OSError) and error.errno not in LASTING:
                raise not_now(path, error) from error
            found = f"cannot be read: {getattr(error, 'strerror', error)}"
            raise InputError(str(path), found, "restore the file") from None
        experiment = parse_yaml(text, str(path))
        if not isinstance(experiment, dict):
            raise InputError(str(path), "holds no mapping", "restore the file")
        return experiment

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Store the machine, the versions and the state of git."""
        text = json.dumps(dict(environment), indent=2, allow_nan=False)
        write_whole(self.path / ENVIRONMENT_FILE, f"{text}\n".encode())

    def read_environment(self, *, now: bool = False) -> dict[str, Any]:
        """The machine, the versions and the state of git; empty where none can be read.

        `now` raises `InputError` where only a passing reason is in the way, for who would write it.
        """
        path = self.path / ENVIRONMENT_FILE
        try:
            content = read_regular(path)
            check_values(content)
            environment = json.loads(content, parse_int=_whole_number)
        except (ValueError, RecursionError):
            return {}
        except OSError as error:
            if now and error.errno not in LASTING:
                raise not_now(path, error) from error
            return {}
        return environment if isinstance(environment, dict) else {}

    def trial_folder(self, trial_id: str) -> Path:
        """Where a trial's files lie; made by `create_trial`."""
        return self.path / TRIALS_FOLDER / trial_id

    def create_trial(self, trial_id: str) -> Path:
        """An existing folder for the trial's files."""
        folder = self.trial_folder(trial_id)
        folder.mkdir(parents=True, exist_ok=True)
        flush_folder(folder.parent)
        return folder

    def set_aside(self, path: Path, why: str) -> Path:
        """Keep a trial's folder or a file of the run, as `set-aside/NAME.WHY-N`."""
        place = self._fresh_aside(f"{path.name}.{why}")
        path.rename(place)
        flush_folder(place.parent)
        return place

    def take_up(self, model: type[ModelT], name: str, tell: Callable[[str], None]) -> ModelT | None:
        """The run's file of that name; None where there is none to be believed.

        A damaged one is set aside and told.  Raises `InputError` for one that must stay.
        """
        path = self.path / name
        try:
            return read_model(model, path)
        except FileNotFoundError:
            return None
        except ValueError as error:
            self.set_aside(path, "damaged")
            tell(f"{path}: {error}: it is measured again")
            return None

    def set_run_aside(self) -> Path:
        """Keep all that was measured as a run of its own, `set-aside/run-N`, and begin anew."""
        with suppress(OSError):  # what holds something stays
            (self.path / TRIALS_FOLDER).rmdir()
        present = [name for name in RUN_FILES if (self.path / name).exists()]
        place = self._begun_aside(present) or self._fresh_aside("run")
        place.mkdir(exist_ok=True)
        for name in present:
            (self.path / name).rename(place / name)
        flush_folder(place)
        (self.path / TRIALS_FOLDER).mkdir()
        flush_folder(self.path)
        return place

    def _begun_aside(self, names: Sequence[str]) -> Path | None:
        """What a killed command was about to set aside: the rest, of those names, belongs to it."""
        numbered = {
            int(place.name.removeprefix("run-")): place
            for place in (self.path / ASIDE_FOLDER).glob("run-*")
            if place.name.removeprefix("run-").isdecimal()
        }
        newest = numbered.get(max(numbered, default=0))
        if newest is None or any((newest / name).exists() for name in (*names, EXPERIMENT_FILE)):
            return None
        return newest

    def _fresh_aside(self, name: str) -> Path:
        folder = self.path / ASIDE_FOLDER
        folder.mkdir(exist_ok=True)
        places = (folder / f"{name}-{number}" for number in count(1))
        return next(place for place in places if not place.exists())

    def write_result(self, result: TrialResult) -> TrialResult:
        """Write `result.json` with the records of the files beside it; return what was written.

        The trial is finished from this moment on, so it comes last.
        """
        folder = self.create_trial(result.id)
        present = [folder / name for name in RECORDED_FILES if (folder / name).exists()]
        records = {path.name: file_record(path, flush=True) for path in present}
        stored = _finite(result).model_copy(update={"files": records})
        content = stored.model_dump_json(indent=1).encode()
        TrialResult.model_validate_json(content)  # what cannot be read back is not written
        write_whole(folder / RESULT_FILE, content + b"\n")
        return stored

    def read_result(self, trial_id: str, *, verify: bool = False) -> TrialResult | Damaged | None:
        """The trial's result; None where there is none.  `verify` compares the files' hashes.

        Raises `InputError` for one that must stay: of a newer version, or not to be read now.
        """
        path = self.trial_folder(trial_id) / RESULT_FILE
        try:
            result = read_model(TrialResult, path)
            _check(result, path.parent, verify=verify)
        except FileNotFoundError:
            return None
        except ValueError as error:
            return Damaged(path, str(error))
        return result

    def read(self, *, verify: bool = False) -> StoredRun:
        """Every trial of the run; `verify` compares the files' hashes too, which takes longer."""
        trials: list[TrialResult] = []
        damaged: list[Damaged] = []
        missing: list[str] = []
        for folder in self._trial_folders():
            result: TrialResult | Damaged | None
            try:
                result = self.read_result(folder.name, verify=verify)
            except InputError as error:
                _, reason, remedy = error.args
                result = Damaged(folder / RESULT_FILE, f"{reason}; {remedy}")
            if result is None:
                missing.append(folder.name)
            elif isinstance(result, Damaged):
                damaged.append(result)
            else:
                trials.append(result)
        trials.sort(key=lambda trial: (trial.order, trial.id))
        verification = None
        with suppress(ValueError, InputError):
            verification = read_verification(self.path)
        fingerprint = None
        with suppress(ValueError, InputError):
            fingerprint = read_if_there(Fingerprint, self.path / FINGERPRINT_FILE)
        return StoredRun(
            path=self.path,
            trials=tuple(trial for trial in trials if not trial.twin),
            twins=tuple(trial for trial in trials if trial.twin),
            strategies=self._strategies(),
            damaged=tuple(damaged),
            missing=tuple(missing),
            verification=verification,
            fingerprint=fingerprint,
        )

    def _strategies(self) -> tuple[str, ...]:
        with suppress(InputError, KeyError, TypeError):
            entries = self.read_experiment()["matrix"]["strategy"]
            return tuple(str(e["name"] if isinstance(e, dict) else e) for e in entries)
        return ()

    def _trial_folders(self) -> list[Path]:
        folder = self.path / TRIALS_FOLDER
        try:
            return sorted(path for path in folder.iterdir() if path.is_dir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise not_now(folder, error) from error


def is_run(path: Path) -> bool:
    """Whether a run was begun in the folder."""
    return (path / EXPERIMENT_FILE).is_file() or (path / TRIALS_FOLDER).is_dir()


def has_results(path: Path) -> bool:
    """Whether a trial of the run has left one, whatever it is worth."""
    return any((path / TRIALS_FOLDER).glob(f"*/{RESULT_FILE}"))


def load_run(path: Path, *, verify: bool = False) -> StoredRun:
    """Read a run folder; raises `InputError`, with the runs nearby, for any other path."""
    if not is_run(path):
        found = "is no run folder" if path.exists() else "does not exist"
        raise InputError(str(path), found, _runs_nearby(path))
    refuse_links(path)
    return RunFolder(path).read(verify=verify)


def refuse_links(folder: Path) -> None:
    """Raise `InputError` for a link below a run: who plants one has others read or overwritten.

    What is inside a SLURM job's folder is left out: `submitit` makes links there, and no command
    reads results from it.
    """
    waiting = [folder]
    while waiting:
        inside = waiting.pop()
        try:
            with os.scandir(inside) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        remedy = "put what it leads to in its place, or remove it"
                        raise InputError(entry.path, "is a link", remedy)
                    own_job = entry.name == JOB_FOLDER and inside == folder
                    if entry.is_dir(follow_symlinks=False) and not own_job:
                        waiting.append(Path(entry.path))
        except FileNotFoundError:
            continue  # a trial under way has removed it
        except OSError as error:
            raise not_now(inside, error) from error


def _runs_nearby(path: Path) -> str:
    expected = f"expected a folder with {EXPERIMENT_FILE} and {TRIALS_FOLDER}/"
    runs = [*_runs_in(path), *_runs_in(path.parent)][:3]
    if runs:
        return f"{expected}, for example {', '.join(map(str, runs))}"
    return f"{expected}, as `shardmark run --out DIR` writes"


def _runs_in(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if is_run(path))
    except OSError:
        return []


def _check(result: TrialResult, folder: Path, *, verify: bool) -> None:
    """Raise `ValueError` for what no run writes, although each value by itself could be."""
    if result.id != folder.name:
        raise ValueError(f"belongs to another trial: its id is {result.id!r}")
    for name, record in result.files.items():
        if name not in RECORDED_FILES:
            raise ValueError(f"files.{name}: no trial has such a file")
        check_record(folder / name, record, verify=verify)
    for key in ("workload", "recipe", "measure"):
        if not isinstance(result.trial.get(key, {}), dict):
            raise ValueError(f"trial.{key} is no mapping")
    given = result.trial.get("world_size", result.world_size)
    if given != result.world_size:
        raise ValueError(f"trial.world_size is {given!r}, but world_size is {result.world_size}")
    trained = any(rank.role == "worker" and rank.lost is None for rank in result.ranks)
    if result.outcome is Outcome.OK and not (trained and result.layout.training_ranks):
        raise ValueError("its outcome is ok, but no rank that trains is in it")
    check_bounds(result)


def _whole_number(text: str) -> float:
    """One that is no count of anything is not finite: arithmetic with it would overflow."""
    return int(text) if len(text) < 20 else float(text)


def _finite(result: TrialResult) -> TrialResult:
    """Without metrics that are no finite number: JSON has no name for them, and no table a use."""
    metrics = dict(result.metrics)
    missing = dict(result.missing)
    for name, summary in result.metrics.items():
        if summary is not None and not math.isfinite(summary.value):
            metrics[name] = None
            missing[name] = f"not a finite number ({summary.value})"
    return result.model_copy(update={"metrics": metrics, "missing": missing})
