"""The training tasks: model, data, loss and quality metrics.  This module imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import SerializeAsAny, WrapValidator

from shardmark.base.errors import DataError, InputError
from shardmark.base.system.extras import require
from shardmark.base.system.plugins import load_plugin
from shardmark.ranks.workloads.options import WorkloadOptions

if TYPE_CHECKING:
    from shardmark.ranks.workloads.base import Workload

WORKLOADS: Mapping[str, str] = {
    "classification": "shardmark.ranks.workloads.vision.options:ClassificationOptions",
    "detection": "shardmark.extras.detection.options:DetectionOptions",
    "language": "shardmark.ranks.workloads.language.options:LanguageOptions",
    "own": "shardmark.ranks.workloads.own.options:OwnOptions",
    "script": "shardmark.ranks.workloads.script.options:ScriptOptions",
}
"""Class of each task's options, which is imported when the task is needed."""
PLUGINS = "shardmark.workloads"
"""Group of the entry points by which other packages register options of tasks."""


@cache
def options_class(name: str) -> type[WorkloadOptions]:
    """Import the options of the task of that name, built-in or registered by a package.

    Raises `InputError` for a package that cannot be imported.
    """
    if name in WORKLOADS:
        built_in: type[WorkloadOptions] = resolve_name(WORKLOADS[name])
        return built_in
    return load_plugin(PLUGINS, name, WorkloadOptions)


def validated(values: Mapping[str, Any] | WorkloadOptions) -> WorkloadOptions:
    """Validate the options of the task that `name` names.  Raises `pydantic.ValidationError`."""
    name = values.name if isinstance(values, WorkloadOptions) else values["name"]
    return options_class(name).model_validate(values)


options = validated
"""An earlier name, which is that of a module, too."""

if TYPE_CHECKING:
    TaskOptions = WorkloadOptions
else:
    TaskOptions = Annotated[
        WorkloadOptions, WrapValidator(lambda values, _: validated(values)), SerializeAsAny()
    ]
"""The options of any task.  A rank imports those of its own task alone."""


def check_data(options: WorkloadOptions) -> int | None:
    """Number of training samples; None if only a rank can count them.  Imports no torch.

    Raises `DataError` or `InputError` for missing or invalid data.  Runs once before the first
    trial, and makes everything that all ranks read, such as tokens.
    """
    check_extras(options)
    samples: int | None = _data(options).check(options)
    return samples


def check_extras(options: WorkloadOptions) -> None:
    """Raise `InputError` with the command that installs the first missing library of the task."""
    for module, place in options.optional_modules().items():
        require(module, needed_for=place)


def data_paths(options: WorkloadOptions) -> tuple[Path, ...]:
    """Files and folders that training reads; some may not exist yet."""
    paths: tuple[Path, ...] = _data(options).paths(options)
    return paths


def corpora(options: WorkloadOptions) -> Mapping[str, str]:
    """SHA-256 of each embedded text corpus, by name; empty for other data."""
    digests = getattr(_data(options), "corpora", None)
    return {} if digests is None else digests(options)


def task_modules(options: WorkloadOptions) -> tuple[str, ...]:
    """Modules that the ranks import, to be loaded before the first trial; the task comes first."""
    return (f"{_room(options)}.task", *options.loads())


def build_workload(options: WorkloadOptions, seed: int) -> Workload:
    """Read the data and create the task; the seed determines everything random in it."""
    check_extras(options)
    built: Workload = importlib.import_module(task_modules(options)[0]).build(options, seed)
    return built


def shortened(options: WorkloadOptions) -> WorkloadOptions:
    """The same task with no more validation samples than a verification needs."""
    most = options.verified_samples
    few = min(most, options.validation_samples or most)
    short = options.model_copy(update={"validation_samples": few})
    try:
        check_data(short)
    except InputError:
        return options  # the data have fewer
    except DataError:
        pass  # whoever reads the data will say so
    return short


def _room(options: WorkloadOptions) -> str:
    """The package of the task: module `data` finds data without torch, module `task` trains."""
    return type(options).__module__.removesuffix(".options")


def _data(options: WorkloadOptions) -> Any:
    return importlib.import_module(f"{_room(options)}.data")
