"""What the options of every task have in common.  Imports no torch."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt

from shardmark.core.errors import DataError, InputError
from shardmark.core.recipe import Model

if TYPE_CHECKING:
    from shardmark.workloads.base import Workload


class WorkloadOptions(Model):
    """The `workload` mapping of an experiment; the field `name` says which task it is."""

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


class PictureOptions(WorkloadOptions):
    """What every task on pictures lets the user choose."""

    verified_samples: ClassVar[int]
    """Most validation samples that a verification evaluates."""

    name: str
    model: str
    model_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed to the model as they are."""
    dataset: str
    data_dir: str | None = None
    """Folder that holds the data set's layout; `~` expands."""
    download: bool = False
    training_samples: PositiveInt | None = None
    """Train on so many samples, drawn from the seed; null takes all."""
    validation_samples: PositiveInt | None = None
    """Validate on so many samples, drawn from the seed; null takes all."""
    loader_workers: NonNegativeInt = 0
    """Processes of each rank that make batches ahead; 0 makes them inside the step."""
    on_broken: Literal["fail", "skip"] = "fail"
    """Unreadable picture: end the trial, or train on the next readable one and report it."""

    @property
    def folder(self) -> Path:
        """`data_dir` as a path."""
        assert self.data_dir is not None, "checked for the data sets that ask"
        return Path(self.data_dir).expanduser()

    def check_sample_counts(self, training: int, validation: int) -> None:
        """Raise `InputError` where more samples are asked for than there are."""
        for key, wanted, available in (
            ("training_samples", self.training_samples, training),
            ("validation_samples", self.validation_samples, validation),
        ):
            if wanted is not None and wanted > available:
                raise InputError(
                    f"workload.{key}", f"found {wanted}", f"{self.dataset} has {available} at most"
                )

    def shortened(self) -> Self:
        """The same task with few validation samples, or unchanged where the data have fewer."""
        few = min(self.verified_samples, self.validation_samples or self.verified_samples)
        short = self.model_copy(update={"validation_samples": few})
        try:
            short.check_data()
        except InputError:
            return self
        except DataError:
            pass  # whoever reads the data will say so
        return short
