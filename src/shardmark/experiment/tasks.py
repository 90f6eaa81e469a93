"""The `workload` section of an experiment: the options of one of all tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Field, SerializeAsAny, ValidatorFunctionWrapHandler, WrapValidator

from shardmark.base.system.plugins import plugin_names
from shardmark.ranks.workloads import PLUGINS, WORKLOADS, options_class
from shardmark.ranks.workloads.options import WorkloadOptions

TASKS: Mapping[str, type[WorkloadOptions]] = {name: options_class(name) for name in WORKLOADS}


def _of_any_package(value: Any, built_in: ValidatorFunctionWrapHandler) -> Any:
    name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
    if isinstance(name, str) and name not in TASKS and name in plugin_names(PLUGINS):
        return options_class(name).model_validate(value)
    return built_in(value)


if TYPE_CHECKING:
    WorkloadSection = WorkloadOptions
else:
    WorkloadSection = Annotated[
        Union[tuple(TASKS.values())],  # noqa: UP007  (made at run time)
        Field(discriminator="name"),
        WrapValidator(_of_any_package),
        SerializeAsAny(),
    ]
"""The field `name` selects the class."""
