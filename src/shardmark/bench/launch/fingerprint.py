"""Computes a run's fingerprint and refuses to mix runs of different ones.  Imports no torch.

Sources of the user's modules, data and versions are known before anything is started; the ranks
report the models that they have built.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from shardmark.base.errors import InputError
from shardmark.base.masking import masked_commands
from shardmark.base.recipe import Measure
from shardmark.base.results.files import read_if_exists, write_model
from shardmark.base.results.fingerprint import (
    FINGERPRINT_FILE,
    DataRecord,
    Fingerprint,
    ModelRecord,
    SourceRecord,
)
from shardmark.base.results.schema import RankRecord
from shardmark.base.results.store import EXPERIMENT_FILE, RunFolder, has_results, is_run
from shardmark.base.system.modules import find_without_import
from shardmark.base.text import canonical
from shardmark.experiment.experiment import Experiment
from shardmark.ranks.trial import Trial
from shardmark.ranks.workloads import corpora, data_paths

REMEDY = "measure into a new folder (--out DIR), or everything anew (--remeasure)"
GROWING = (
    *("matrix", "placement", "engine", "limits", "measure.repeats", "measure.max_remeasure"),
    *("measure.verify", "measure.accept", "measure.link_seconds", "measure.twin"),
)
"""Keys that may change between two commands on the same folder: trials stay comparable."""
PACKAGES = ("torch", "torchvision", "deepspeed", "timm", "transformers", "numpy")
PACKAGE = Path(__file__).parents[2]
MAX_STATUSES = 20_000
"""Most files of a folder whose size and time count; of more, every second, third, ... counts."""


def fingerprint_of(trials: Sequence[Trial]) -> Fingerprint:
    """Return the fingerprint of the sources and data of the trials."""
    workloads = [trial.workload for trial in trials]
    paths = dict.fromkeys(path for workload in workloads for path in data_paths(workload))
    records = {str(path): data_record(path) for path in paths}
    data = {path: record for path, record in records.items() if record is not None}
    texts = dict(item for workload in workloads for item in corpora(workload).items())
    return sources_of(trials).merged(Fingerprint(data=data, corpora=texts))


def sources_of(trials: Iterable[Trial]) -> Fingerprint:
    """Return the fingerprint of the sources of the user's modules."""
    return Fingerprint(sources=local_sources(name for t in trials for name in t.user_modules()))


def versions_of(environments: Sequence[Mapping[str, Any]]) -> Fingerprint:
    """Return the versions of packages, driver and devices of all machines of the run."""
    versions: dict[str, set[str]] = {}
    for environment in environments:
        packages, cuda = environment.get("packages", {}), environment.get("cuda", {})
        named = {
            "shardmark": environment.get("shardmark"),
            **{name: packages.get(name) for name in PACKAGES},
            "CUDA driver": cuda.get("driver_version"),
            "GPU": ", ".join(sorted({device["name"] for device in cuda.get("devices", ())})),
            "CPU": environment.get("cpu", {}).get("model"),
        }
        for name, version in named.items():
            if version:
                versions.setdefault(name, set()).add(str(version))
    joined = {name: " and ".join(sorted(values)) for name, values in versions.items()}
    return Fingerprint(versions=joined)


def check_same_run(folder: Path, experiment: Experiment, content: Fingerprint) -> None:
    """Raise `InputError` if the folder holds a run of another experiment, code or data."""
    if (folder / EXPERIMENT_FILE).exists():
        before = RunFolder(folder).read_experiment()
        now = masked_commands(experiment.model_dump(mode="json"))
        # An axis's first value stands in the base, too, and its values may come in another order.
        axes = before.get("matrix", {}).keys() & experiment.matrix.keys()
        for key, stored, requested in _changed_keys(before, now):
            if key == "measure.seeds" and not _seeds_differ(
                before.get("measure", {}), experiment.measure
            ):
                continue
            if not key.startswith((*GROWING, *axes)):
                change = f"holds a run with {key} = {stored!r}, here it is {requested!r}"
                raise InputError(str(folder), change, REMEDY)
    elif has_results(folder):
        raise InputError(str(folder), f"has results and no {EXPERIMENT_FILE}", REMEDY)
    refuse_changes(folder, content)


def _seeds_differ(before: Mapping[str, Any], now: Measure) -> bool:
    """Return whether a repeat of the stored run would now train with another seed.

    The first repeat always has the recipe's seed.
    """
    several = before.get("seeds", 1) > 1, now.seeds > 1
    return several[0] != several[1] and before.get("repeats") != 1


def _changed_keys(
    before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for key in sorted(before.keys() | now.keys()):
        stored, requested = before.get(key), now.get(key)
        if isinstance(stored, Mapping) and isinstance(requested, Mapping):
            yield from _changed_keys(stored, requested, f"{prefix}{key}.")
        elif stored != requested:
            yield f"{prefix}{key}", stored, requested


def refuse_changes(folder: Path, now: Fingerprint) -> None:
    """Raise `InputError` if the folder has a run with another fingerprint."""
    if not is_run(folder):
        return
    try:
        before = _stored(folder)
    except ValueError as error:
        raise InputError(str(folder / FINGERPRINT_FILE), str(error), REMEDY) from None
    if before is None and has_results(folder):
        raise InputError(str(folder), f"has results and no {FINGERPRINT_FILE}", REMEDY)
    if before is not None and (changes := sorted(before.changes(now))):
        problem = f"holds results of something else; changed since: {', '.join(changes)}"
        raise InputError(str(folder), problem, REMEDY)


def _stored(folder: Path) -> Fingerprint | None:
    return read_if_exists(Fingerprint, folder / FINGERPRINT_FILE)


def add(folder: RunFolder, now: Fingerprint) -> None:
    """Add new parts to the run's fingerprint."""
    before = _stored(folder.path)
    if (merged := (before or Fingerprint()).merged(now)) != before:
        write_model(folder.path / FINGERPRINT_FILE, merged)


def changed_meanwhile(folder: RunFolder, trial: Trial, records: Iterable[RankRecord]) -> str | None:
    """Return how this trial differs from the run's others; add its model to the fingerprint."""
    before = _stored(folder.path)
    if before is None:
        return None
    now = sources_of([trial])
    for record in records:
        if differs := next(now.changes(Fingerprint(corpora=record.corpora)), None):
            return f"the ranks differ in {differs}"
        now = now.merged(Fingerprint(corpora=record.corpora))
        counted = None if record.probe is None else record.probe.parameters
        if counted is not None and record.structure_sha256 is not None:
            model = ModelRecord(parameters=counted, structure_sha256=record.structure_sha256)
            options = masked_commands(trial.workload.model_dump(mode="json"))
            key = hashlib.sha256(canonical(options).encode()).hexdigest()[:12]
            now = now.merged(Fingerprint(models={key: model}))
    if changes := sorted(before.changes(now)):
        return f"the trial differs from the run's others; changed meanwhile: {', '.join(changes)}"
    add(folder, now)
    return None


def data_record(path: Path) -> DataRecord | None:
    """Return the record of a file or folder as it is now; None if it does not exist."""
    if path.is_dir():
        names = sorted(str(file.relative_to(path)) for file in _files_below(path))
    elif path.exists():
        names = [""]
    else:
        return None
    digest = hashlib.sha256("\0".join(names).encode(errors="surrogateescape"))
    for name in names[:: 1 + len(names) // MAX_STATUSES]:
        try:
            status = (path / name).stat()
        except OSError as error:  # a broken link; reading it reports more
            digest.update(f"\0errno {error.errno}".encode())
        else:
            digest.update(f"\0{status.st_size} {status.st_mtime_ns}".encode())
    return DataRecord(files=len(names), index_sha256=digest.hexdigest())


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent) / name for name in names if not name.startswith("."))


def local_sources(modules: Iterable[str]) -> dict[str, SourceRecord]:
    """Return records of the modules, and of all local modules that their sources import.

    A local module is neither installed, nor part of Python or of Shardmark.
    """
    records: dict[str, SourceRecord] = {}
    waiting = list(dict.fromkeys(modules))
    folders = [_as_file(name).parent for name in waiting if name.endswith(".py")]
    seen = set(waiting)
    while waiting:
        file = _file_of(name := waiting.pop(), folders)
        if file is None:
            continue
        content = file.read_bytes()
        shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
        records[name] = SourceRecord(file=str(shown), sha256=hashlib.sha256(content).hexdigest())
        if file.suffix == ".py":
            package = name if file.name == "__init__.py" else name.rpartition(".")[0]
            package = "" if name.endswith(".py") else package
            new = set(_imported(content, package)) - seen
            seen |= new
            waiting += new
    return records


def _as_file(name: str) -> Path:
    return Path(name).expanduser().absolute()


def _file_of(name: str, folders: Sequence[Path]) -> Path | None:
    """Return the file of a local module, or of a module that is named by its file; else None."""
    if name.endswith(".py"):
        return _as_file(name) if _as_file(name).is_file() else None
    spec = find_without_import(name, folders)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin)
    return file if file.is_file() and _is_local(file) else None


def _is_local(file: Path) -> bool:
    if {"site-packages", "dist-packages"} & set(file.parts):
        return False
    foreign = (str(PACKAGE), *(sysconfig.get_path(key) for key in ("stdlib", "platstdlib")))
    installed = (folder for folder in sys.path if folder and _has_installed(folder))
    return not any(file.is_relative_to(root) for root in chain(foreign, installed))


@cache
def _has_installed(folder: str) -> bool:
    """True for a folder of installed packages, as `pip install --target` makes it."""
    return any(Path(folder).glob("*.dist-info"))


def _imported(source: bytes, package: str) -> Iterator[str]:
    """Yield imported names that may be modules, and their packages, which are imported first."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # importing it reports the error
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            parts = [*(parents if node.level else ()), *([node.module] if node.module else [])]
            base = ".".join(parts)
            names += (f"{base}.{alias.name}" for alias in node.names)
    for name in names:
        if name.startswith("."):
            continue  # relative, and in no package: it cannot be imported
        parts = name.split(".")
        yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))
