"""Options of a user-defined task: its class and arguments.  Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator

from shardmark.ranks.workloads.models import is_user_function, user_function_problem
from shardmark.ranks.workloads.options import Adapter, WorkloadOptions, modules_of

REQUIRED_METHODS = ("model", "train_data", "validation_data", "loss")


class OwnOptions(WorkloadOptions):
    """A task of your own: one class with its model, data and loss."""

    verified_samples: ClassVar[int] = 256

    name: Literal["own"] = "own"
    task: str
    """`package.module:Class` or `folder/file.py:Class`; see the guide 'Your own task'."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the class."""
    adapter: Adapter | None = None
    """Trains an adapter beside the frozen weights, instead of the weights."""
    evaluation_batch: PositiveInt = 64
    """Number of validation samples that the task evaluates at once."""

    @field_validator("task")
    @classmethod
    def _check_task(cls, name: str) -> str:
        if not is_user_function(name):
            raise ValueError(
                f"task {name!r} names no class; use package.module:Class or folder/file.py:Class"
            )
        problem = user_function_problem(name, REQUIRED_METHODS)
        if problem is not None:
            raise ValueError(f"task {name!r}: {problem}")
        return name

    @property
    def data_name(self) -> str:
        return self.task

    def optional_modules(self) -> dict[str, str]:
        return modules_of(self.adapter)

    def loads(self) -> tuple[str, ...]:
        return tuple(modules_of(self.adapter))

    def user_modules(self) -> tuple[str, ...]:
        return (self.task.rpartition(":")[0],)
