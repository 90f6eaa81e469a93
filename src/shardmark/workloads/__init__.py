"""What is trained: a model, its data, its loss and its quality.  This module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from shardmark.core.errors import InputError
from shardmark.workloads.detection.options import DetectionOptions
from shardmark.workloads.options import WorkloadOptions
from shardmark.workloads.vision.options import ClassificationOptions

if TYPE_CHECKING:
    from shardmark.workloads.base import Workload

WORKLOADS: dict[str, type[WorkloadOptions]] = {
    "classification": ClassificationOptions,
    "detection": DetectionOptions,
}
"""Task -> the options that an experiment may give it, which also build it."""


def options(mapping: Mapping[str, Any]) -> WorkloadOptions:
    """The checked options of the task that `mapping["name"]` names.

    Raises `InputError` for a missing or unknown name, `pydantic.ValidationError` for its fields.
    """
    known = ", ".join(sorted(WORKLOADS))
    if "name" not in mapping:
        raise InputError("workload.name", "is missing", f"allowed: {known}")
    name = mapping["name"]
    if not isinstance(name, str) or name not in WORKLOADS:
        nearest = get_close_matches(str(name), WORKLOADS, n=1)
        hint = f"did you mean {nearest[0]!r}?  allowed: " if nearest else "allowed: "
        raise InputError("workload.name", f"unknown task {name!r}", hint + known)
    return WORKLOADS[name].model_validate(dict(mapping))


def check_data(options_mapping: Mapping[str, Any]) -> None:
    """Raise `DataError` or `InputError` if the task's data cannot be there.  Imports no torch."""
    options(options_mapping).check_data()


def build_workload(options_mapping: Mapping[str, Any], seed: int) -> Workload:
    """Read the data and make the task; all that is random in it comes from the seed."""
    return options(options_mapping).build(seed)
