"""What the options of every task have in common.  Imports no torch."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Self

from shardmark.core.errors import DataError, InputError
from shardmark.core.recipe import Model

if TYPE_CHECKING:
    from shardmark.workloads.base import Workload
    from shardmark.workloads.vision.options import ClassificationOptions


class WorkloadOptions(Model):
    """The `workload` mapping of an experiment; the field `name` says which task it is."""

    @abstractmethod
    def check_data(self) -> None:
        """Raise `DataError` or `InputError` if the data cannot be there.  Imports no torch."""

    def shortened(self) -> Self:
        """The same task with no more validation samples than a verification needs."""
        return self

    def evaluating(self, few: int) -> Self:
        """The same task with `few` validation samples, or unchanged where the data have fewer."""
        short = self.model_copy(update={"validation_samples": few})
        try:
            short.check_data()
        except InputError:
            return self
        except DataError:
            pass  # whoever reads the data will say so
        return short

    def loads(self) -> tuple[str, ...]:
        """Modules that the ranks will import, so that they can be loaded before the first trial."""
        return ()

    @abstractmethod
    def build(self, seed: int) -> Workload:
        """Read the data and make the task."""


def check_sample_counts(options: ClassificationOptions, training: int, validation: int) -> None:
    """Raise `InputError` where the options ask for more samples than there are."""
    for key, wanted, available in (
        ("training_samples", options.training_samples, training),
        ("validation_samples", options.validation_samples, validation),
    ):
        if wanted is not None and wanted > available:
            raise InputError(
                f"workload.{key}", f"found {wanted}", f"{options.dataset} has {available} at most"
            )
