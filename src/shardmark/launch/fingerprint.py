"""Takes a run's fingerprint and refuses to mix it with another.  Imports no torch.

The source of the user's modules, data and versions are known before anything is started; what
model was built, the ranks tell.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmark.config.axes import canonical
from shardmark.config.experiment import Experiment
from shardmark.core.errors import InputError
from shardmark.results.files import read_if_exists, write_model
from shardmark.results.fingerprint import (
    FINGERPRINT_FILE,
    DataRecord,
    Fingerprint,
    ModelRecord,
    SourceRecord,
)
from shardmark.results.schema import RankRecord
from shardmark.results.store import EXPERIMENT_FILE, RunFolder, has_results, is_run
from shardmark.trials.trial import Trial
from shardmark.workloads import corpora, data_paths
from shardmark.workloads.models import find_without_import

REMEDY = "measure into a new folder (--out DIR), or everything anew (--remeasure)"
GROWING = (
    *("matrix", "placement", "engine", "limits", "measure.repeats", "measure.max_remeasure"),
    *("measure.verify", "measure.link_seconds", "measure.twin"),
)
"""Keys that may change between two commands on the same folder: trials stay comparable."""
PACKAGES = ("torch", "torchvision", "deepspeed", "timm", "transformers", "numpy")
PACKAGE = Path(__file__).parents[1]
MOST_STATUSES = 20_000
"""Of a folder with more files, sizes and times of every second, third, ... file are looked at."""


def fingerprint_of(trials: Sequence[Trial]) -> Fingerprint:
    """Source and data of what the trials train."""
    workloads = [trial.workload for trial in trials]
    paths = dict.fromkeys(path for workload in workloads for path in data_paths(workload))
    records = {str(path): data_record(path) for path in paths}
    data = {path: record for path, record in records.items() if record is not None}
    texts = dict(item for workload in workloads for item in corpora(workload).items())
    return sources_of(trials).merged(Fingerprint(data=data, corpora=texts))


def sources_of(trials: Iterable[Trial]) -> Fingerprint:
    """Source of the user's modules alone."""
    modules = [name for trial in trials for name in trial.workload.user_modules()]
    own = [part.path for t in trials for part in (t.recipe.optimizer, t.recipe.schedule)]
    modules += [path.rpartition(":")[0] for path in own if path is not None]
    return Fingerprint(sources=local_sources(modules))


def versions_of(environments: Sequence[Mapping[str, Any]]) -> Fingerprint:
    """Packages, driver and devices of all machines of the run."""
    seen: dict[str, set[str]] = {}
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
                seen.setdefault(name, set()).add(str(version))
    return Fingerprint(versions={name: " and ".join(sorted(of)) for name, of in seen.items()})


def check_same_run(folder: Path, experiment: Experiment, content: Fingerprint) -> None:
    """Raise `InputError` if the folder holds a run of another experiment, code or data."""
    if (folder / EXPERIMENT_FILE).exists():
        before, now = RunFolder(folder).read_experiment(), experiment.model_dump(mode="json")
        # An axis's first value stands in the base, too, and its values may come in another order.
        axes = before.get("matrix", {}).keys() & experiment.matrix.keys()
        for key, stored, requested in _changed_keys(before, now):
            if not key.startswith((*GROWING, *axes)):
                change = f"holds a run with {key} = {stored!r}, here it is {requested!r}"
                raise InputError(str(folder), change, REMEDY)
    elif has_results(folder):
        raise InputError(str(folder), f"has results and no {EXPERIMENT_FILE}", REMEDY)
    refuse_changes(folder, content)


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
    """Raise `InputError` where the run in the folder, if any, trained something else."""
    if not is_run(folder):
        return
    try:
        before = _stored(folder)
    except ValueError as error:
        raise InputError(str(folder / FINGERPRINT_FILE), str(error), REMEDY) from None
    if before is None and has_results(folder):
        raise InputError(str(folder), f"has results and no {FINGERPRINT_FILE}", REMEDY)
    if before is not None and (changes := sorted(before.changes(now))):
        what = f"holds results of something else; changed since: {', '.join(changes)}"
        raise InputError(str(folder), what, REMEDY)


def _stored(folder: Path) -> Fingerprint | None:
    return read_if_exists(Fingerprint, folder / FINGERPRINT_FILE)


def add(folder: RunFolder, now: Fingerprint) -> None:
    """Add to the run's fingerprint what was compared with it."""
    before = _stored(folder.path)
    if (merged := (before or Fingerprint()).merged(now)) != before:
        write_model(folder.path / FINGERPRINT_FILE, merged)


def changed_meanwhile(folder: RunFolder, trial: Trial, records: Iterable[RankRecord]) -> str | None:
    """What this trial trained otherwise than the run's others; its model is noted if it is new."""
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
            now = now.merged(Fingerprint(models={_model_key(trial): model}))
    if changes := sorted(before.changes(now)):
        return f"not what the run's other trials train; changed meanwhile: {', '.join(changes)}"
    add(folder, now)
    return None


def _model_key(trial: Trial) -> str:
    options = trial.workload.model_dump(mode="json")
    return hashlib.sha256(canonical(options).encode()).hexdigest()[:12]


def data_record(path: Path) -> DataRecord | None:
    """Of a file or folder as it is now; None where nothing is there."""
    if path.is_dir():
        names = sorted(str(file.relative_to(path)) for file in _files_below(path))
    elif path.exists():
        names = [""]
    else:
        return None
    digest = hashlib.sha256("\0".join(names).encode(errors="surrogateescape"))
    for name in names[:: 1 + len(names) // MOST_STATUSES]:
        try:
            status = (path / name).stat()
        except OSError as error:  # a link that leads nowhere; whoever reads it tells more
            digest.update(f"\0errno {error.errno}".encode())
        else:
            digest.update(f"\0{status.st_size} {status.st_mtime_ns}".encode())
    return DataRecord(files=len(names), index_sha256=digest.hexdigest())


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent) / name for name in names if not name.startswith("."))


def local_sources(modules: Iterable[str]) -> dict[str, SourceRecord]:
    """The modules and all local ones that they import, however deep, as their source tells.

    Local is what is neither installed nor Python's nor Shardmark's own.
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
    """Of a local module, or the module itself where it is named by its file; None for any other."""
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
    return not any(file.is_relative_to(root) for root in foreign)


def _imported(source: bytes, package: str) -> Iterator[str]:
    """Names that may be modules, and the packages around them, which are run first."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # whoever imports it says so
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            around = package.split(".")[: len(package.split(".")) - node.level + 1]
            parts = [*(around if node.level else ()), *([node.module] if node.module else [])]
            base = ".".join(parts)
            names += (f"{base}.{alias.name}" for alias in node.names)
    for name in names:
        if name.startswith("."):
            continue  # relative, and in no package: it cannot be imported
        parts = name.split(".")
        yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))
