"""Models with batch norms that can be synchronised; the values need several ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmark.base.errors import StrategyUnavailable
from shardmark.ranks.strategies import build_strategy
from shardmark.ranks.strategies.batch_norm import synchronise_batch_norms
from shardmark.ranks.strategies.step import EagerWorker
from tests.unit.ranks.train.toy import ALONE, CPU, ToyWorkload, assert_same, normed, plain, recipe

GPU = torch.device("cuda")


class Activated(nn.BatchNorm1d):
    """A norm with its activation, as timm's: torch's conversion would drop what comes after."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).relu()


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (plain, "the model has no batch norm"),
        (lambda: nn.Sequential(nn.BatchNorm1d(4), Activated(4)), "Activated computes more"),
    ],
)
@pytest.mark.parametrize("device", [CPU, GPU])
def test_models_without_plain_batch_norm_are_refused(
    model: Callable[[], nn.Module], told: str, device: torch.device
) -> None:
    with pytest.raises(StrategyUnavailable, match=told) as caught:
        synchronise_batch_norms(model(), device)
    assert caught.value.remedy == "set recipe.sync_batch_norm to false"


@pytest.mark.usefixtures("alone")
def test_one_rank_keeps_its_batch_norms() -> None:
    found, expected = (
        build_strategy("single", {}).start(
            ToyWorkload(normed), recipe(sync_batch_norm=asked), ALONE
        )
        for asked in (True, False)
    )
    assert isinstance(found, EagerWorker)
    assert isinstance(expected, EagerWorker)
    assert_same(found.full_parameters(), expected.full_parameters())
    assert {type(module) for module in found.module.modules()} == {
        type(module) for module in normed().modules()
    }


def test_gpus_use_torch_s_norm_over_the_same_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    model = normed()
    before = {name: id(p) for name, p in (*model.named_parameters(), *model.named_buffers())}
    converted = synchronise_batch_norms(model, GPU)
    kinds = [type(module) for module in converted.modules()]
    assert (kinds.count(nn.SyncBatchNorm), kinds.count(nn.BatchNorm1d)) == (1, 0)
    after = (*converted.named_parameters(), *converted.named_buffers())
    assert {name: id(tensor) for name, tensor in after} == before


def test_settings_name_the_samples_of_the_statistics() -> None:
    told = [
        str(build_strategy("fsdp", {}).settings(recipe(sync_batch_norm=asked))["batch_norm"])
        for asked in (False, True)
    ]
    assert "each rank's share" in told[0]
    assert "over all ranks" in told[1]
