"""What the options of every task have in common.  Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from shardmark.core.errors import DataError, InputError
from shardmark.core.recipe import Model
from shardmark.workloads.models import is_user_function, looked_in


class WorkloadOptions(Model):
    """What every task lets the user choose; the field `name` says which task it is."""

    verified_samples: ClassVar[int]
    """Most validation samples that a verification evaluates."""
    on_pictures: ClassVar[bool] = True
    """Whether its models may have convolutions on pictures."""

    name: str
    training_samples: PositiveInt | None = None
    """Train on so many samples, drawn from the seed; null takes all."""
    validation_samples: PositiveInt | None = None
    """Validate on so many samples, drawn from the seed; null takes all."""
    loader_workers: NonNegativeInt = 0
    """Processes of each rank that make batches ahead; 0 makes them inside the step."""

    @property
    def data_name(self) -> str:
        """What messages call the data."""
        return "the data set"

    @property
    def casts_parameters(self) -> bool:
        """Whether its models compute with 16-bit parameters, as far as is known."""
        return True

    @property
    def fetches_data(self) -> bool:
        """Whether looking for the data may download them."""
        return False

    @property
    def tokens_per_sample(self) -> int | None:
        """Where every sample has as many; None where they differ, or are not made of tokens."""
        return None

    def user_modules(self) -> tuple[str, ...]:
        """Modules of the user's that the task imports."""
        return ()

    def loads(self) -> tuple[str, ...]:
        """Modules of libraries that the task imports only for such options."""
        return ()

    def check_sample_counts(self, training: int, validation: int) -> int:
        """The number of training samples; `InputError` where more are asked for than there are."""
        for key, wanted, available in (
            ("training_samples", self.training_samples, training),
            ("validation_samples", self.validation_samples, validation),
        ):
            if wanted is not None and wanted > available:
                raise InputError(
                    f"workload.{key}",
                    f"found {wanted}",
                    f"{self.data_name} has {available} at most",
                )
        return self.training_samples or training


class ModelOptions(WorkloadOptions):
    """What every task with a model by name and data of ours lets the user choose."""

    model: str
    model_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed to the model as they are."""
    dataset: str
    data_dir: str | None = None
    """Folder that holds the data set's layout; `~` expands."""

    @property
    def data_name(self) -> str:
        return self.dataset

    @property
    def folder(self) -> Path:
        """`data_dir` as a path.  Raises `DataError` for one that cannot be looked at."""
        assert self.data_dir is not None, "checked for the data sets that ask"
        try:
            folder = Path(self.data_dir).expanduser()
            folder.exists()
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise DataError(self.data_dir[:60], reason, "name another data_dir") from None
        return folder

    def no_folder(self, remedy: str, what: str = "no such folder") -> DataError:
        """The error of a `data_dir` that is missing, or no folder."""
        found = "is not a folder" if self.folder.exists() else f"{what}{looked_in(self.folder)}"
        return DataError(f"workload.data_dir: {self.folder}", found, remedy)

    def user_modules(self) -> tuple[str, ...]:
        return (self.model.rpartition(":")[0],) if is_user_function(self.model) else ()


class PictureOptions(ModelOptions):
    """What every task on pictures lets the user choose."""

    download: bool = False
    on_broken: Literal["fail", "skip"] = "fail"
    """Unreadable picture: end the trial, or train on the next readable one and report it."""

    @property
    def fetches_data(self) -> bool:
        return self.download
