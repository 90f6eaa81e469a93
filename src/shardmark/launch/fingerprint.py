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
from importlib import metadata
from inspect import getfile
from pathlib import Path
from typing import Any

from shardmark.config.axes import canonical
from shardmark.core.errors import InputError
from shardmark.results.files import read_if_exists, write_model
from shardmark.results.fingerprint import (
    FINGERPRINT_FILE,
    DataRecord,
    Fingerprint,
    ModelRecord,
    SourceRecord,
)
from shardmark.results.runs_folder import RUNS
from shardmark.results.schema import RankRecord
from shardmark.results.store import RunFolder, has_results, is_run
from shardmark.trials.trial import Trial
from shardmark.workloads import corpora, data_paths
from shardmark.workloads.models import find_without_import

REMEDY = "measure into a new folder (--out DIR), or everything anew (--remeasure)"
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


def proofs_folder(trials: Sequence[Trial], environments: Sequence[Mapping[str, Any]]) -> Path:
    """Verdicts of `verify`, named by the code, data and versions that they hold for."""
    trained = fingerprint_of(trials).merged(versions_of(environments))
    packages = sorted(f"{each.name} {each.version}" for each in metadata.distributions())
    digest = hashlib.sha256("\n".join((trained.model_dump_json(), *packages)).encode())
    strategies = {Path(getfile(type(trial.built_strategy))) for trial in trials}
    for file in sorted({*PACKAGE.rglob("*.py"), *strategies}):
        digest.update(file.read_bytes())
    return RUNS / ".verified" / digest.hexdigest()[:16]


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


def note(folder: RunFolder, now: Fingerprint) -> None:
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
    note(folder, now)
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
