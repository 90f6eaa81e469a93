"""What is trained: a model, its data, its loss and its quality.  This module imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter

from shardmark.core.errors import DataError, InputError
from shardmark.workloads.detection.options import DetectionOptions
from shardmark.workloads.language.options import LanguageOptions
from shardmark.workloads.options import WorkloadOptions
from shardmark.workloads.own.options import OwnOptions
from shardmark.workloads.vision.options import ClassificationOptions

if TYPE_CHECKING:
    from shardmark.workloads.base import Workload

TaskOptions = Annotated[
    ClassificationOptions | DetectionOptions | LanguageOptions | OwnOptions,
    Field(discriminator="name"),
]
"""The `workload` of an experiment: its name says which task it is."""
_TASK_OPTIONS: TypeAdapter[WorkloadOptions] = TypeAdapter(TaskOptions)

WORKLOADS: dict[str, type[WorkloadOptions]] = {
    "classification": ClassificationOptions,
    "detection": DetectionOptions,
    "language": LanguageOptions,
    "own": OwnOptions,
}


def options(mapping: Mapping[str, Any]) -> WorkloadOptions:
    """The checked options of a task.  Raises `pydantic.ValidationError`."""
    checked: WorkloadOptions = _TASK_OPTIONS.validate_python(dict(mapping))
    return checked


def check_data(options: WorkloadOptions) -> int | None:
    """The number of training samples; None where only the ranks can tell.  Imports no torch.

    Raises `DataError` or `InputError` if the data cannot be there.  Runs once before the first
    trial: whatever has to be made or read once is made here.
    """
    samples: int | None = _data(options).check(options)
    return samples


def data_paths(options: WorkloadOptions) -> tuple[Path, ...]:
    """Files and folders that training reads; some may not be there yet."""
    paths: tuple[Path, ...] = _data(options).paths(options)
    return paths


def corpora(options: WorkloadOptions) -> Mapping[str, str]:
    """SHA-256 of the text that comes with the installation, by name; empty for other data."""
    if not isinstance(options, LanguageOptions):
        return {}
    digests: Mapping[str, str] = _data(options).corpora(options)
    return digests


def task_modules(options: WorkloadOptions) -> tuple[str, ...]:
    """What the ranks will import, to be loaded before the first trial; the task comes first."""
    return (f"{_room(options)}.task", *options.loads())


def build_workload(options: WorkloadOptions, seed: int) -> Workload:
    """Read the data and make the task; all that is random in it comes from the seed."""
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
    """Its `data` looks for the data without torch, its `task` reads them and trains."""
    return type(options).__module__.removesuffix(".options")


def _data(options: WorkloadOptions) -> Any:
    return importlib.import_module(f"{_room(options)}.data")
