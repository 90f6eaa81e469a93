"""The recipe's settings of execution change neither names nor values."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shardmark.base.errors import InputError, StrategyUnavailable
from shardmark.ranks.strategies.execution import prepare
from shardmark.ranks.train.record import weights_sha256
from tests.distributed.models import small
from tests.unit.ranks.train.toy import ToyWorkload, recipe


def hashed(model: nn.Module) -> str:
    return weights_sha256(sorted(model.named_parameters()))


@pytest.mark.parametrize("keeps_strides", [True, False])
def test_convolutions_compute_in_channels_last(keeps_strides: bool) -> None:
    """Also where a library, as FSDP, takes only weights in their usual order."""
    torch.manual_seed(0)
    model, pictures = small(10).eval(), torch.rand(4, 3, 32, 32)
    before, expected = hashed(model), model(pictures)
    asked = recipe(channels_last=True)
    prepare(model, ToyWorkload(), asked, keeps_strides=keeps_strides)
    seen: list[Tensor] = []
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    for convolution in convolutions:
        convolution.register_forward_hook(lambda *call: seen.append(call[2]))
    found = model(pictures)
    assert len(seen) == len(convolutions) == 4
    assert all(out.is_contiguous(memory_format=torch.channels_last) for out in seen)
    assert all(c.weight.is_contiguous() is not keeps_strides for c in convolutions)
    assert hashed(model) == before
    torch.testing.assert_close(found, expected)


def test_channels_last_without_convolutions_is_refused() -> None:
    workload = ToyWorkload()
    with pytest.raises(InputError, match=r"channels_last: true, and the model has no weight of 4"):
        prepare(workload.build_model(), workload, recipe(channels_last=True))


@pytest.mark.parametrize("asked", ["blocks", "model"])
def test_compiled_parts_keep_their_names(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial)
    model = small(10)
    assert isinstance(model, nn.Sequential)
    names, parts = (
        [*model.state_dict()],
        {"blocks": [*model[1].children()], "model": [model]}[asked],
    )
    prepare(model, ToyWorkload(), recipe(compile=asked))
    assert [*model.state_dict()] == names
    assert [module for module in model.modules() if "forward" in vars(module)] == parts


def test_compiling_blocks_without_repeated_parts_is_refused() -> None:
    workload = ToyWorkload()
    with pytest.raises(InputError, match=r"compile: blocks, and the model has no repeated part"):
        prepare(workload.build_model(), workload, recipe(compile="blocks"))


def test_compiling_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(StrategyUnavailable, match=r"no no-such-compiler .* recipe.compile to none"):
        prepare(small(10), ToyWorkload(), recipe(compile="model"))
