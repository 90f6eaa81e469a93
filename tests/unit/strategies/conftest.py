"""One thread: the models are tiny and the machine is shared."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.unit.strategies.network import Scene


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Scene:
    """Two workers and parameters of zero."""
    scene = Scene(monkeypatch, workers=2)
    with torch.no_grad():
        for parameter in scene.model.parameters():
            parameter.zero_()
    return scene


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch does not list it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
