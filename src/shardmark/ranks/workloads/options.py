"""Options that all tasks have in common.  Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from shardmark.base.errors import DataError, InputError
from shardmark.base.recipe import Model
from shardmark.base.system.modules import looked_in
from shardmark.ranks.workloads.models import is_user_function


class Adapter(Model):
    """Small matrices that are trained beside the model's own weights, which are frozen."""

    name: Literal["lora"] = "lora"
    """LoRA (Hu et al., arXiv 2106.09685), by the library `peft`."""
    rank: PositiveInt = 8
    """Rank of the product of two matrices that is added to each weight."""
    alpha: PositiveFloat = 16
    """The product is multiplied by `alpha` / `rank`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout before the first matrix."""
    targets: tuple[str, ...] | None = None
    """Last parts of the names of the layers that get matrices, such as `[q_proj, v_proj]`; null:
    every linear layer of the model's blocks, or of a model without declared blocks."""
    base: Literal["fp32", "bf16", "fp16", "nf4"] = "fp32"
    """Type of the frozen weights.  `nf4`: linear layers and experts of the blocks in 4 bits and the
    rest in bf16, as QLoRA (Dettmers et al., arXiv 2305.14314); `plan` predicts it, `run` refuses
    it."""


class WorkloadOptions(Model):
    """Base class of the options of a task; the field `name` identifies the task."""

    verified_samples: ClassVar[int]
    """Maximum number of validation samples that a verification evaluates."""
    on_pictures: ClassVar[bool] = True
    """True if the models of the task may have convolutions over images."""
    models: ClassVar[Mapping[str, str]] = {}
    """Models by name, each with a description of one line."""

    name: str
    training_samples: PositiveInt | None = None
    """Number of training samples, a random subset drawn from the seed; null uses all."""
    validation_samples: PositiveInt | None = None
    """Number of validation samples, a random subset drawn from the seed; null uses all."""
    loader_workers: NonNegativeInt = 0
    """Worker processes per rank that prepare batches; 0 prepares them inside the step."""

    @property
    def data_name(self) -> str:
        """Name of the data in messages."""
        return "the data set"

    @property
    def casts_parameters(self) -> bool:
        """True unless the models are known to fail with 16-bit parameters."""
        return True

    @property
    def fetches_data(self) -> bool:
        """True if `check_data` may download the data."""
        return False

    @property
    def tokens_per_sample(self) -> int | None:
        """Tokens in every sample; None if samples differ in length or have no tokens."""
        return None

    def user_modules(self) -> tuple[str, ...]:
        """User modules that the task imports."""
        return ()

    def optional_modules(self) -> dict[str, str]:
        """Modules of extras that the task imports, each with the key and value that need it."""
        return {}

    def loads(self) -> tuple[str, ...]:
        """Library modules that the task imports only for these options."""
        return ()

    def without_weights(self) -> Self:
        """Return options of the same costs whose model needs no file of weights."""
        return self

    def check_sample_counts(self, training: int, validation: int) -> int:
        """Number of training samples; `InputError` if the options ask for more than there are."""
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


def modules_of(adapter: Adapter | None) -> dict[str, str]:
    """Return the modules that an adapter needs, in the form of `optional_modules`."""
    return {} if adapter is None else {"peft": f"workload.adapter {adapter.name}"}


class ModelOptions(WorkloadOptions):
    """Base class of the options of a task with a named model and a built-in data set."""

    model: str
    model_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments that are passed to the model unchanged."""
    dataset: str
    data_dir: str | None = None
    """Folder of the data set; `~` is expanded."""

    @property
    def data_name(self) -> str:
        return self.dataset

    @property
    def folder(self) -> Path:
        """`data_dir` as a path.  Raises `DataError` if it cannot be accessed."""
        assert self.data_dir is not None, "the options require it for this data set"
        try:
            folder = Path(self.data_dir).expanduser()
            folder.exists()
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise DataError(self.data_dir[:60], reason, "name another data_dir") from None
        return folder

    def no_folder(self, remedy: str, problem: str = "no such folder") -> DataError:
        """The error for a `data_dir` that is missing or is not a folder."""
        if self.folder.exists():
            problem = "is not a folder"
        else:
            problem += looked_in(self.folder)
        return DataError(f"workload.data_dir: {self.folder}", problem, remedy)

    def user_modules(self) -> tuple[str, ...]:
        return (self.model.rpartition(":")[0],) if is_user_function(self.model) else ()


class PictureOptions(ModelOptions):
    """Base class of the options of a task on images."""

    download: bool = False
    on_broken: Literal["fail", "skip"] = "fail"
    """Unreadable image: end the trial, or use the next readable image and report it."""

    @property
    def fetches_data(self) -> bool:
        return self.download
