"""DataParallel for lists of samples, without any device."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardmark.ranks.strategies.replicas import Replicas, split
from shardmark.ranks.strategies.step import autocast
from tests.unit.ranks.train.toy import recipe

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize("items", [1, 3, 8])
def test_shares_have_the_sizes_of_torch_chunks(items: int) -> None:
    tensor = torch.arange(items)
    for parts in (1, 2, 3, 4, 7):
        chunks = [chunk.tolist() for chunk in tensor.chunk(parts)]
        assert split(tensor.tolist(), parts) == chunks
        assert [part.tolist() for part in split(tensor, parts)] == chunks


def pictures(number: int) -> list[Tensor]:
    return [torch.full((3, 4 + place, 5), float(place)) for place in range(number)]


def test_each_device_gets_whole_samples() -> None:
    targets = [{"boxes": torch.zeros(place, 4), "seed": place} for place in range(5)]
    more = {"scale": (torch.ones(1), None), "flag": True}
    inputs, kwargs = Replicas(nn.Identity()).scatter((pictures(5), targets), more, [CPU, META])
    assert [[len(part) for part in device] for device in inputs] == [[3, 3], [2, 2]]
    assert [target["seed"] for _, part in inputs for target in part] == [0, 1, 2, 3, 4]
    assert all(map(torch.equal, inputs[0][0], pictures(3)))
    assert [picture.shape for picture in inputs[1][0]] == [(3, 7, 5), (3, 8, 5)]
    assert {picture.device for picture in inputs[1][0]} == {META}
    assert inputs[1][1][0]["boxes"].device == kwargs[1]["scale"][0].device == META
    assert kwargs[1]["scale"][1] is None
    assert kwargs[0]["flag"] is kwargs[1]["flag"] is True


@pytest.mark.parametrize(("number", "used"), [(1, 1), (3, 3), (5, 3)])
def test_devices_without_a_sample_are_left_out(number: int, used: int) -> None:
    inputs, kwargs = Replicas(nn.Identity()).scatter((pictures(number),), None, [CPU] * 4)
    assert kwargs == ({},) * used
    assert sum(len(given) for (given,) in inputs) == number


def test_losses_of_the_devices_become_a_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch warns that it gathers scalars; that is what is wanted."""

    def gather(_: object, outputs: list[Tensor], device: object) -> Tensor:
        told = "Was asked to gather along dimension 0, but all input tensors were scalars"
        warnings.warn(told, stacklevel=2)
        assert device == 0
        return torch.stack(outputs)

    monkeypatch.setattr(nn.DataParallel, "gather", gather)
    gathered = Replicas(nn.Identity()).gather([torch.tensor(1.0), torch.tensor(3.0)], 0)
    assert gathered.tolist() == [1.0, 3.0]


def test_each_copy_computes_in_the_recipe_s_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies compute in threads, which would autocast in another type, as torch's do."""

    def in_threads(_: object, modules: list[Any], inputs: list[Any], kwargs: object) -> list[Any]:
        assert kwargs == [{}, {}]

        def work(module: Any, given: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.float16):
                return module(*given)

        with ThreadPoolExecutor() as threads:
            return list(threads.map(work, modules, inputs))

    monkeypatch.setattr(nn.DataParallel, "parallel_apply", in_threads)
    asked = recipe(precision="bf16")
    replicas = Replicas(nn.Linear(3, 2), precision=partial(autocast, asked, CPU))
    inputs = [(torch.ones(4, 3),)] * 2
    outputs = replicas.parallel_apply([nn.Linear(3, 2)] * 2, inputs, [{}, {}])
    assert [output.dtype for output in outputs] == [torch.bfloat16] * 2
