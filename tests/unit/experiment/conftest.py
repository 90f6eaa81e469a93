"""Small tables in place of the real ones, so that these tests say what planning does with any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

import shardmark.strategies
import shardmark.workloads
from shardmark.config.experiment import Experiment
from shardmark.config.load import from_mapping, load_experiment
from shardmark.core.errors import InputError
from shardmark.strategies.layout import Layout, replicas

BASE: dict[str, Any] = {
    "name": "test",
    "workload": {"name": "toy"},
    "recipe": {"global_batch": 64, "epochs": 2},
    "matrix": {"strategy": ["alone", "both"], "world_size": [2]},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    name: str = "alone"

    def unsupported_reason(self, world_size: int, nodes: int = 1) -> str | None:  # noqa: ARG002
        return None if world_size == 1 else "alone is one device"

    def layout(self, world_size: int, nodes: int = 1) -> Layout:  # noqa: ARG002
        return replicas(world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Both:
    name: str = "both"
    bucket_mb: float = 25.0
    stage: int = 0

    def unsupported_reason(self, world_size: int, nodes: int = 1) -> str | None:  # noqa: ARG002
        return None if world_size > 1 else "one rank has nobody"

    def layout(self, world_size: int, nodes: int = 1) -> Layout:  # noqa: ARG002
        return replicas(world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server on top of the workers, as the last process."""

    name: str = "served"
    staleness: int = 1

    def unsupported_reason(self, world_size: int, nodes: int = 1) -> str | None:  # noqa: ARG002
        return None if world_size > 1 else "one worker learns alone"

    def layout(self, world_size: int, nodes: int = 1) -> Layout:  # noqa: ARG002
        return replicas(world_size, servers=1)


class ToyOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["toy"] = "toy"
    model: Literal["small", "large"] = "small"
    data_dir: Path | None = None


class NeedyOptions(BaseModel):
    """An option without a default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["needy"] = "needy"
    vocabulary: int


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    strategies = {
        "alone": Alone,
        "both": Both,
        "both-1": partial(Both, name="both-1", stage=1),
        "served": Served,
    }
    monkeypatch.setattr(shardmark.strategies, "STRATEGIES", strategies)
    workloads = {"toy": ToyOptions, "needy": NeedyOptions}
    monkeypatch.setattr(shardmark.workloads, "WORKLOADS", workloads)


@pytest.fixture
def make() -> Callable[..., Experiment]:
    """A valid experiment, changed by `key=value` overrides."""

    def build(*overrides: str) -> Experiment:
        return from_mapping(BASE, overrides)

    return build


@pytest.fixture
def message(make: Callable[..., Experiment]) -> Callable[..., str]:
    """What is said about the valid experiment with these overrides."""

    def text(*overrides: str) -> str:
        with pytest.raises(InputError) as caught:
            make(*overrides)
        return str(caught.value)

    return text


@pytest.fixture
def file_message(tmp_path: Path) -> Callable[[str | bytes], str]:
    """What is said about a file with this content; the file is called FILE."""

    def text(content: str | bytes) -> str:
        path = tmp_path / "experiment.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(InputError) as caught:
            load_experiment(path)
        return str(caught.value).replace(str(path), "FILE")

    return text
