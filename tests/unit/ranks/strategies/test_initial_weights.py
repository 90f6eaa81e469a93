"""A model that gets its weights from a file is the model that was built."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardmark.base.errors import ShardmarkError
from shardmark.ranks.strategies.casting import narrow_weights
from shardmark.ranks.strategies.initial_weights import WeightsFile, write_weights
from shardmark.ranks.workloads.model_building import build_on_meta, seeded


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.words.weight
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("drawn", torch.randn(4), persistent=False)
        nn.init.normal_(self.words.weight)


class Workload:
    def __init__(self, model: Any) -> None:
        self.model = model

    def build_model(self) -> nn.Module:
        with seeded(3):
            built: nn.Module = self.model()
        return built


def test_parts_are_filled_from_the_weights_file(tmp_path: Path) -> None:
    workload: Any = Workload(Tied)
    built, meta_model = workload.build_model(), build_on_meta(workload)
    assert meta_model is not None
    assert all(parameter.is_meta for parameter in meta_model.parameters())
    write_weights(built, tmp_path / "weights")
    with (tmp_path / "weights").open("rb") as file:
        weights = WeightsFile(file, meta_model)
        for part in (meta_model.get_submodule("words"), meta_model):
            weights.fill(part)
    expected = dict((*built.named_parameters(), *built.named_buffers()))
    found = dict((*meta_model.named_parameters(), *meta_model.named_buffers()))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    trained = [[p.requires_grad for p in model.parameters()] for model in (meta_model, built)]
    assert trained[0] == trained[1]
    assert meta_model.get_parameter("head.weight") is meta_model.get_parameter("words.weight")


def test_a_file_in_fp32_fills_a_model_of_bf16_weights(tmp_path: Path) -> None:
    workload: Any = Workload(Tied)
    built, meta_model = workload.build_model(), build_on_meta(workload)
    assert meta_model is not None
    write_weights(built, tmp_path / "weights")
    with (tmp_path / "weights").open("rb") as file:
        weights = WeightsFile(file, meta_model)
        narrow_weights(meta_model)
        weights.fill(meta_model)
    narrow_weights(built)
    torch.testing.assert_close(meta_model.state_dict(), built.state_dict(), rtol=0, atol=0)
    assert {p.dtype for p in meta_model.parameters()} == {torch.bfloat16}
    assert meta_model.get_buffer("drawn").dtype == torch.float32


def test_another_model_and_a_short_file_are_refused(tmp_path: Path) -> None:
    workload: Any = Workload(Tied)
    meta_model = build_on_meta(workload)
    assert meta_model is not None
    write_weights(nn.Linear(2, 2), tmp_path / "weights")
    with (
        (tmp_path / "weights").open("rb") as file,
        pytest.raises(ShardmarkError, match="differs"),
    ):
        WeightsFile(file, meta_model)
    write_weights(workload.build_model(), tmp_path / "weights")
    with (tmp_path / "weights").open("rb") as file:
        weights = WeightsFile(file, meta_model)
        os.truncate(tmp_path / "weights", 8)
        with pytest.raises(ShardmarkError, match="ends early"):
            weights.fill(meta_model)


def test_a_parameter_larger_than_the_memory_is_built_on_meta() -> None:
    """The experts of a layer of DeepSeek-V3 have 30 GB together."""
    empty = torch.empty
    workload: Any = Workload(lambda: nn.Linear(2**20, 2**24, bias=False))
    model = build_on_meta(workload)
    assert model is not None
    assert sum(p.numel() for p in model.parameters()) == 2**44
    assert torch.empty is empty


def test_a_constructor_that_reads_its_weights_is_built_whole() -> None:
    def reads() -> nn.Module:
        model = nn.Linear(2, 2)
        assert model.weight.sum().item() < 100
        return model

    workload: Any = Workload(reads)
    assert build_on_meta(workload) is None
    assert not any(p.is_meta for p in workload.build_model().parameters())


def test_large_tensors_of_experts_begin_on_the_meta_device() -> None:
    """Zeros too, of which Llama 4 makes 5 GiB in each layer."""
    made: list[torch.Tensor] = []

    def large() -> nn.Module:
        model = nn.Module()
        made.extend(make(2**28 + 1) for make in (torch.empty, torch.ones, torch.zeros))
        model.weight = nn.Parameter(made[-1])
        made.append(torch.zeros(2))
        return model

    workload: Any = Workload(large)
    assert build_on_meta(workload) is not None
    assert [tensor.is_meta for tensor in made] == [True, True, True, False]
    assert not torch.zeros(1).is_meta
