"""What is trained: a model, its data, its loss and its quality.  This module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter

from shardmark.workloads.detection.options import DetectionOptions
from shardmark.workloads.options import WorkloadOptions
from shardmark.workloads.vision.options import ClassificationOptions

if TYPE_CHECKING:
    from shardmark.workloads.base import Workload

TaskOptions = Annotated[ClassificationOptions | DetectionOptions, Field(discriminator="name")]
"""The `workload` of an experiment: its name says which task it is; it builds the task, too."""

WORKLOADS: dict[str, type[WorkloadOptions]] = {
    "classification": ClassificationOptions,
    "detection": DetectionOptions,
}


def options(mapping: Mapping[str, Any]) -> WorkloadOptions:
    """The checked options of a task.  Raises `pydantic.ValidationError`."""
    checked: WorkloadOptions = TypeAdapter(TaskOptions).validate_python(dict(mapping))
    return checked


def build_workload(mapping: Mapping[str, Any], seed: int) -> Workload:
    """Read the data and make the task; all that is random in it comes from the seed."""
    return options(mapping).build(seed)
