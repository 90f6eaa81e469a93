"""A small experiment, and what is said about it when it is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardmark.base.errors import InputError
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.load import from_mapping

BASE: dict[str, Any] = {
    "name": "test",
    "workload": {"name": "classification"},
    "recipe": {"global_batch": 64, "epochs": 2},
    "matrix": {"strategy": ["single", "ddp"], "world_size": [2]},
    "measure": {"repeats": 1},
}


@pytest.fixture
def make() -> Callable[..., Experiment]:
    """The experiment, changed by `key=value` overrides."""

    def build(*overrides: str) -> Experiment:
        return from_mapping(BASE, overrides)

    return build


@pytest.fixture
def message() -> Callable[..., str]:
    """Load the experiment with these overrides and return the error message."""

    def text(*overrides: str) -> str:
        with pytest.raises(InputError) as caught:
            from_mapping(BASE, overrides)
        return str(caught.value)

    return text
