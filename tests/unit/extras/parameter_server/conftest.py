"""A parameter server without processes."""

from __future__ import annotations

import pytest
import torch

from tests.unit.extras.parameter_server.network import Scene


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Scene:
    """Two workers and parameters of zero."""
    scene = Scene(monkeypatch, workers=2)
    with torch.no_grad():
        for parameter in scene.model.parameters():
            parameter.zero_()
    return scene
