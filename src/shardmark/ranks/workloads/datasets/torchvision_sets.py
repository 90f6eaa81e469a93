"""MNIST and CIFAR-10 in torchvision's own layout.  Imports torch only in `load`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmark.base.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

    from shardmark.ranks.workloads.datasets.sources import LabelledPictures
    from shardmark.ranks.workloads.vision.options import ClassificationOptions

IMAGE_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchvisionSet:
    """A data set of torchvision, with all images in memory."""

    class_name: str
    """Name in `torchvision.datasets`."""
    training_samples: int
    validation_samples: int = 10_000
    mean: tuple[float, float, float]
    """Mean of the training images, for each channel."""
    std: tuple[float, float, float]
    files: tuple[str, ...]
    """Paths below `data_dir`."""
    pictures_of: Callable[[Any], Tensor]
    """Converts a split of torchvision to (n, channels, height, width), uint8."""

    def check(self, options: ClassificationOptions) -> int:
        """Raise `DataError` for missing files, `InputError` for more samples than there are."""
        self._missing(options)
        return options.check_sample_counts(self.training_samples, self.validation_samples)

    def paths(self, options: ClassificationOptions) -> tuple[Path, ...]:
        return tuple(options.folder / name for name in self.files)

    def load(self, options: ClassificationOptions, seed: int) -> LabelledPictures:  # noqa: ARG002
        """Read both splits; download them first if they are missing and `download` is true."""
        import torch
        from torchvision import datasets

        from shardmark.ranks.workloads.datasets.sources import InMemory, LabelledPictures

        data_set, folder = getattr(datasets, self.class_name), options.folder
        missing = self._missing(options)
        try:
            if missing:
                with _one_process_at_a_time(folder):
                    data_set(root=folder, train=True, download=True)
            splits = [data_set(root=folder, train=train) for train in (True, False)]
        except (RuntimeError, OSError, ValueError, AssertionError, EOFError) as error:
            raise DataError(
                str(folder),
                f"{options.dataset} cannot be read or downloaded ({error})",
                f"remove broken files; expected {', '.join(self.files)}; `download: true` fetches"
                " them",
            ) from error
        size = options.image_size or IMAGE_SIZE
        training, validation = (
            InMemory(self.pictures_of(split), torch.as_tensor(split.targets).long(), size)
            for split in splits
        )
        return LabelledPictures(
            training=training,
            validation=validation,
            classes=tuple(name.partition(" - ")[0] for name in splits[0].classes),
            image_size=size,
            mean=self.mean,
            std=self.std,
        )

    def _missing(self, options: ClassificationOptions) -> list[str]:
        """Files to download; `DataError` if files are missing and `download` is false."""
        folder = options.folder
        missing = [name for name in self.files if not (folder / name).is_file()]
        if missing and not options.download:
            remedy = f"expected {', '.join(self.files)} in data_dir; `download: true` fetches them"
            if not folder.is_dir():
                raise options.no_folder(remedy, f"no such folder for {options.dataset}")
            problem = f"no {', '.join(missing)} for {options.dataset}"
            raise DataError(str(folder), problem, remedy)
        return missing


@contextmanager
def _one_process_at_a_time(folder: Path) -> Iterator[None]:
    """Lock the folder: the ranks of a machine start together, and one download is enough."""
    import fcntl  # Windows has none

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".shardmark-download.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _cifar10_pictures(split: Any) -> Tensor:
    import torch

    return torch.from_numpy(split.data).permute(0, 3, 1, 2)


MNIST = TorchvisionSet(
    class_name="MNIST",
    training_samples=60_000,
    mean=(0.1307, 0.1307, 0.1307),  # at 28 x 28
    std=(0.3081, 0.3081, 0.3081),
    files=tuple(
        f"MNIST/raw/{split}-{content}-ubyte"
        for split in ("train", "t10k")
        for content in ("images-idx3", "labels-idx1")
    ),
    pictures_of=lambda split: split.data[:, None],
)
"""The MNIST data set (LeCun et al., 1998)."""

CIFAR10 = TorchvisionSet(
    class_name="CIFAR10",
    training_samples=50_000,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    files=tuple(
        f"cifar-10-batches-py/{name}"
        for name in (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch", "batches.meta")
    ),
    pictures_of=_cifar10_pictures,
)
"""The CIFAR-10 data set (Krizhevsky, 2009)."""
