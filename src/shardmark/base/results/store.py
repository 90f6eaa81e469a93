"""The folder of a run: crash-safe writing, and reading that reports damaged files."""

from __future__ import annotations

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

from shardmark.base.errors import InputError
from shardmark.base.files.run_files import LOG_FILE, RESULT_FILE, SAMPLES_FILE, STEPS_FILE
from shardmark.base.files.storage import storage_error
from shardmark.base.masking import masked_commands
from shardmark.base.results.bounds import check_bounds
from shardmark.base.results.files import (
    PERMANENT_ERRORS,
    ModelT,
    check_record,
    check_values,
    file_record,
    flush_folder,
    read_if_exists,
    read_model,
    read_regular,
    temporary_read_error,
    write_atomically,
)
from shardmark.base.results.fingerprint import FINGERPRINT_FILE, Fingerprint
from shardmark.base.results.network import NETWORK_FILE
from shardmark.base.results.runs_folder import LOCK_FILE, latest_run, point_latest_to
from shardmark.base.results.schema import Outcome, TrialResult
from shardmark.base.results.verification import (
    LOGS_FOLDER,
    VERIFICATION_FILE,
    Verification,
    read_verification,
)

EXPERIMENT_FILE = "experiment.yaml"
ENVIRONMENT_FILE = "environment.json"
LINKS_REASON = "links_missing"
"""Key in `environment.json` of the reason for missing measurements of links."""
TRIALS_FOLDER = "trials"
ASIDE_FOLDER = "set-aside"
"""Folder of results that do not belong to the run any more."""
JOB_FOLDER = "slurm"
"""Folder of the jobs that earlier versions submitted to SLURM."""
RUN_FILES = (
    TRIALS_FOLDER,  # first, so that no results remain after a crash
    *(VERIFICATION_FILE, LOGS_FOLDER, NETWORK_FILE),
    *(FINGERPRINT_FILE, ENVIRONMENT_FILE, EXPERIMENT_FILE),
)
RECORDED_FILES = (STEPS_FILE, SAMPLES_FILE, LOG_FILE)


@dataclass(frozen=True, slots=True)
class Damaged:
    """A stored trial whose result cannot be used."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """The content of a run folder."""

    path: Path
    trials: tuple[TrialResult, ...]
    """Results in the order in which the trials ran."""
    twins: tuple[TrialResult, ...] = ()
    """Trials whose initial weights differ by one rounding; they are not repeats."""
    strategies: tuple[str, ...] = ()
    """Names in the order of the experiment's matrix; empty if it cannot be read."""
    damaged: tuple[Damaged, ...] = ()
    missing: tuple[str, ...] = ()
    """Identifiers of trials that started and have no result."""
    verification: Verification | None = None
    """Verdicts on the equivalence of the strategies; None if they were not verified."""
    fingerprint: Fingerprint | None = None
    """Fingerprint of code and data; None if there is none or it cannot be read."""

    @property
    def name(self) -> str:
        """Name of the experiment, or of the folder if there are no trials."""
        for result in self.trials:
            return str(result.trial.get("experiment", self.path.name))
        return self.path.name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of a run.  The object has no state except the path."""

    path: Path

    @staticmethod
    def check(path: Path) -> None:
        """Raise `InputError` if no run can be created or continued at the path."""
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
        """Create the folder or open the run in it; raise `InputError` for any other folder."""
        cls.check(path)
        try:
            (path / TRIALS_FOLDER).mkdir(parents=True, exist_ok=True)
            flush_folder(path)
        except OSError as error:
            raise storage_error(path, error) from error
        return cls(path)

    @contextmanager
    def locked(self, notify: Callable[[str], None]) -> Iterator[None]:
        """Lock the folder against other commands that run trials into it.

        Raises `InputError` if another command holds the lock.  If the file system has no locks,
        `notify` gets a warning.  At the end, the folder is emptied again if no run began in it.
        """
        import fcntl  # Windows has none

        lock = self.path / LOCK_FILE
        if lock.exists() and not lock.is_file():
            raise InputError(str(lock), "is no regular file", "remove it")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(lock, flags, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.fstat(descriptor).st_nlink:
                    raise BlockingIOError  # another command has just removed the file
            except BlockingIOError:
                holder = os.pread(descriptor, 300, 0).decode(errors="replace")
                problem = f"another command runs trials into it: {holder}"
                raise InputError(str(self.path), problem, "wait, or name another --out") from None
            except OSError as error:
                reason = f"{lock} cannot be locked: {error.strerror or error}"
                notify(f"{reason}; run no other command into this folder meanwhile")
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)
            for name in RUN_FILES:
                for temporary in self.path.glob(f".{name}.*.tmp"):  # a killed command left it
                    temporary.unlink()
            try:
                yield
            finally:
                if not (self.path / EXPERIMENT_FILE).exists():
                    with suppress(OSError):  # a folder that holds something stays
                        (self.path / TRIALS_FOLDER).rmdir()
                        lock.unlink()
        finally:
            os.close(descriptor)

    def write_experiment(self, experiment: Mapping[str, Any]) -> None:
        """Store the resolved experiment; from now on `runs/latest` leads to the run."""
        from shardmark.base.files.strict_yaml import format_yaml

        stored = masked_commands(experiment)
        write_atomically(self.path / EXPERIMENT_FILE, format_yaml(stored).encode())
        point_latest_to(self.path)

    def read_experiment(self) -> dict[str, Any]:
        """Read the resolved experiment.  Raises `InputError` if the file is missing or invalid."""
        from shardmark.base.files.strict_yaml import MAX_CHARACTERS, parse_yaml

        path = self.path / EXPERIMENT_FILE
        try:
            text = read_regular(path, MAX_CHARACTERS).decode()
        except (OSError, UnicodeDecodeError) as error:
            if isinstance(error, OSError) and error.errno not in PERMANENT_ERRORS:
                raise temporary_read_error(path, error) from error
            problem = f"cannot be read: {getattr(error, 'strerror', error)}"
            raise InputError(str(path), problem, "restore the file") from None
        experiment = parse_yaml(text, str(path))
        if not isinstance(experiment, dict):
            raise InputError(str(path), "holds no mapping", "restore the file")
        return experiment

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Store the machine, the versions and the state of git."""
        text = json.dumps(dict(environment), indent=2, allow_nan=False)
        write_atomically(self.path / ENVIRONMENT_FILE, f"{text}\n".encode())

    def read_environment(self, *, now: bool = False) -> dict[str, Any]:
        """Read the machine, the versions and the state of git; empty if the file is unreadable.

        With `now`, a temporary failure raises `InputError`, so that the file is not overwritten.
        """
        path = self.path / ENVIRONMENT_FILE
        try:
            content = read_regular(path)
            check_values(content)
            environment = json.loads(
                content,  # a huge integer becomes a float, so that arithmetic does not overflow
                parse_int=lambda text: int(text) if len(text) < 20 else float(text),
            )
        except (ValueError, RecursionError):
            return {}
        except OSError as error:
            if now and error.errno not in PERMANENT_ERRORS:
                raise temporary_read_error(path, error) from error
            return {}
        return environment if isinstance(environment, dict) else {}

    def trial_folder(self, trial_id: str) -> Path:
        """Return the path of a trial's folder, which `create_trial` creates."""
        return self.path / TRIALS_FOLDER / trial_id

    def create_trial(self, trial_id: str) -> Path:
        """Create the folder for a trial's files."""
        folder = self.trial_folder(trial_id)
        folder.mkdir(parents=True, exist_ok=True)
        flush_folder(folder.parent)
        return folder

    def set_aside(self, path: Path, reason: str) -> Path:
        """Move a trial's folder or a file of the run to `set-aside/NAME.REASON-N`."""
        place = self._new_aside_path(f"{path.name}.{reason}")
        path.rename(place)
        flush_folder(place.parent)
        return place

    def read_or_set_aside(
        self, model: type[ModelT], name: str, notify: Callable[[str], None]
    ) -> ModelT | None:
        """Read a file of the run, or return None if it is missing or damaged.

        A damaged file is set aside and reported by `notify`.  Raises `InputError` for a file that
        must not be replaced.
        """
        path = self.path / name
        try:
            return read_model(model, path)
        except FileNotFoundError:
            return None
        except ValueError as error:
            self.set_aside(path, "damaged")
            notify(f"{path}: {error}: it is measured again")
            return None

    def set_run_aside(self) -> Path:
        """Move all results to `set-aside/run-N`, which is a run, and leave an empty run."""
        with suppress(OSError):  # unless it is empty
            (self.path / TRIALS_FOLDER).rmdir()
        present = [name for name in RUN_FILES if (self.path / name).exists()]
        place = self._incomplete_aside_run(present) or self._new_aside_path("run")
        place.mkdir(exist_ok=True)
        for name in present:
            (self.path / name).rename(place / name)
        flush_folder(place)
        (self.path / TRIALS_FOLDER).mkdir()
        flush_folder(self.path)
        return place

    def _incomplete_aside_run(self, names: Sequence[str]) -> Path | None:
        """Return the folder of an interrupted `set_run_aside`, to which these files belong."""
        numbered = {
            int(place.name.removeprefix("run-")): place
            for place in (self.path / ASIDE_FOLDER).glob("run-*")
            if place.name.removeprefix("run-").isdecimal()
        }
        newest = numbered.get(max(numbered, default=0))
        if newest is None or any((newest / name).exists() for name in (*names, EXPERIMENT_FILE)):
            return None
        return newest

    def _new_aside_path(self, name: str) -> Path:
        folder = self.path / ASIDE_FOLDER
        folder.mkdir(exist_ok=True)
        places = (folder / f"{name}-{number}" for number in count(1))
        return next(place for place in places if not place.exists())

    def write_result(self, result: TrialResult) -> TrialResult:
        """Write `result.json` with records of the trial's files, and return the stored result.

        The file marks the trial as finished, so it is written last.
        """
        folder = self.create_trial(result.id)
        present = [folder / name for name in RECORDED_FILES if (folder / name).exists()]
        records = {path.name: file_record(path, flush=True) for path in present}
        stored = _finite(result).model_copy(update={"files": records})
        content = stored.model_dump_json(indent=1).encode()
        TrialResult.model_validate_json(content)  # never write a file that cannot be read
        write_atomically(folder / RESULT_FILE, content + b"\n")
        return stored

    def read_result(self, trial_id: str, *, verify: bool = False) -> TrialResult | Damaged | None:
        """Read a trial's result, or return None.  `verify` compares the hashes of its files.

        Raises `InputError` for a result that must not be replaced: it has a newer version, or
        cannot be read at present.
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
        """Read all trials of the run; `verify` also compares the hashes of their files."""
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
            fingerprint = read_if_exists(Fingerprint, self.path / FINGERPRINT_FILE)
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
            raise temporary_read_error(folder, error) from error


def is_run(path: Path) -> bool:
    """Return whether the folder has a run."""
    return (path / EXPERIMENT_FILE).is_file() or (path / TRIALS_FOLDER).is_dir()


def has_results(path: Path) -> bool:
    """Return whether the run has a result file."""
    return any((path / TRIALS_FOLDER).glob(f"*/{RESULT_FILE}"))


def load_run(path: Path, *, verify: bool = False) -> StoredRun:
    """Read a run folder.  Raises `InputError`, which names runs nearby, for any other path."""
    if not is_run(path):
        problem = "is no run folder" if path.exists() else "does not exist"
        raise InputError(str(path), problem, _runs_nearby(path))
    refuse_links(path)
    return RunFolder(path).read(verify=verify)


def load_runs(runs: Sequence[Path] | None) -> list[StoredRun]:
    """Load each folder once, or the latest run.  Raises `InputError` for a folder without a run."""
    folders = {path.resolve(): path for path in runs or [latest_run()]}
    return [load_run(path) for path in folders.values()]


def refuse_links(folder: Path) -> None:
    """Raise `InputError` for a link in a run, which could lead to files outside of it.

    The folder of SLURM jobs is not searched: it has links, and no command reads results from it.
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
                    is_job_folder = entry.name == JOB_FOLDER and inside == folder
                    if entry.is_dir(follow_symlinks=False) and not is_job_folder:
                        waiting.append(Path(entry.path))
        except FileNotFoundError:
            continue  # removed by a running trial
        except OSError as error:
            raise temporary_read_error(inside, error) from error


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
    """Raise `ValueError` for a result whose values contradict each other."""
    if result.id != folder.name:
        raise ValueError(f"belongs to another trial: its id is {result.id!r}")
    for name, record in result.files.items():
        if name not in RECORDED_FILES:
            raise ValueError(f"files.{name}: no trial has such a file")
        check_record(folder / name, record, verify=verify)
    for key in ("workload", "recipe", "measure"):
        if not isinstance(result.trial.get(key, {}), dict):
            raise ValueError(f"trial.{key} is no mapping")
    world_size = result.trial.get("world_size", result.world_size)
    if world_size != result.world_size:
        raise ValueError(
            f"trial.world_size is {world_size!r}, but world_size is {result.world_size}"
        )
    trained = any(rank.role == "worker" for rank in result.ranks)
    if result.outcome is Outcome.OK and not (trained and result.layout.training_ranks):
        raise ValueError("its outcome is ok, but no rank that trains is in it")
    check_bounds(result)


def _finite(result: TrialResult) -> TrialResult:
    """Replace metrics that are not finite, which JSON cannot store, by None and a reason."""
    metrics = dict(result.metrics)
    missing = dict(result.missing)
    for name, summary in result.metrics.items():
        if summary is not None and not math.isfinite(summary.value):
            metrics[name] = None
            missing[name] = f"not a finite number ({summary.value})"
    return result.model_copy(update={"metrics": metrics, "missing": missing})
