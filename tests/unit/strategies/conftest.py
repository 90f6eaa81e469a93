"""A parameter server without processes, and a process group of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.unit.strategies.network import Scene


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
