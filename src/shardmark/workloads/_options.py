"""What the options of every task have in common.  Imports no torch."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from shardmark.workloads._protocol import Workload


class WorkloadOptions(BaseModel):
    """The `workload` mapping of an experiment; the field `name` says which task it is."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @abstractmethod
    def check_data(self) -> None:
        """Raise `DataError` or `InputError` if the data cannot be there.  Imports no torch."""

    def shortened(self) -> Self:
        """The same task with no more validation samples than a verification needs."""
        return self

    def loads(self) -> tuple[str, ...]:
        """Modules that the ranks will import, so that they can be loaded before the first trial."""
        return ()

    @abstractmethod
    def build(self, seed: int) -> Workload:
        """Read the data and make the task."""
