"""Small data on disk, and one thread: the machine is shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.unit.workloads.detection_folder import write

MakeFolder = Callable[..., Path]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """Writes an image folder of random pictures."""

    def make(
        *,
        classes: tuple[str, ...] = ("ant", "bee", "cat"),
        per_class: int = 4,
        size: int = 8,
        splits: tuple[str, ...] = ("train", "test"),
    ) -> Path:
        drawn = np.random.default_rng(0)
        for split in splits:
            for name in classes:
                folder = tmp_path / split / name
                folder.mkdir(parents=True)
                for number in range(per_class):
                    pixels = drawn.integers(0, 256, (size, size, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(folder / f"{number}.png")
        return tmp_path

    return make


@pytest.fixture
def detection_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six pictures of three sizes in each split, with a cache of their own."""
    monkeypatch.setenv("SHARDMARK_CACHE", str(tmp_path / "cache"))
    return write(tmp_path / "data")
