"""DataParallel for lists of samples, without any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardmark.strategies.replicas import Replicas, moved, shares

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("items", [1, 2, 3, 4, 5, 8])
def test_shares_are_as_large_as_torch_makes_them(items: int, parts: int) -> None:
    tensor = torch.arange(items)
    chunks = [chunk.tolist() for chunk in tensor.chunk(parts)]
    assert shares(tensor.tolist(), parts) == chunks
    assert [part.tolist() for part in shares(tensor, parts)] == chunks


def test_all_tensors_move() -> None:
    nested = {"a": [torch.ones(2), (torch.ones(3), 4)], "b": "text", "c": None}
    found = moved(nested, META)
    assert found["a"][0].device == found["a"][1][0].device == META
    assert (found["a"][1][1], found["b"], found["c"]) == (4, "text", None)
    assert isinstance(found["a"][1], tuple)
    assert nested["a"][0].device == CPU  # type: ignore[index,union-attr]


def pictures(number: int) -> list[Tensor]:
    return [torch.full((3, 4 + place, 5), float(place)) for place in range(number)]


def scattered(number: int, devices: Sequence[torch.device], **more: Any) -> Any:
    targets = [{"boxes": torch.zeros(place, 4), "seed": place} for place in range(number)]
    replicas = Replicas(nn.Identity())
    return replicas.scatter((pictures(number), targets), more, devices)


def test_each_device_gets_whole_samples() -> None:
    inputs, kwargs = scattered(5, [CPU, META], scale=torch.ones(1), flag=True)
    assert [[len(part) for part in device] for device in inputs] == [[3, 3], [2, 2]]
    assert [target["seed"] for _, targets in inputs for target in targets] == [0, 1, 2, 3, 4]
    assert all(map(torch.equal, inputs[0][0], pictures(3)))
    assert [picture.shape for picture in inputs[1][0]] == [(3, 7, 5), (3, 8, 5)]
    assert {picture.device for picture in inputs[1][0]} == {META}
    assert inputs[1][1][0]["boxes"].device == kwargs[1]["scale"].device == META
    assert kwargs[0]["flag"] is kwargs[1]["flag"] is True


@pytest.mark.parametrize(("number", "used"), [(1, 1), (3, 3), (5, 3)])
def test_devices_without_a_sample_are_left_out(number: int, used: int) -> None:
    inputs, kwargs = scattered(number, [CPU] * 4)
    assert len(inputs) == len(kwargs) == used
    assert sum(len(given) for given, _ in inputs) == number


def test_without_keyword_arguments() -> None:
    inputs, kwargs = Replicas(nn.Identity()).scatter((pictures(2),), None, [CPU, CPU])
    assert [len(given) for (given,) in inputs] == [1, 1]
    assert kwargs == ({}, {})


def test_other_inputs_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(nn.DataParallel, "scatter", lambda _, *rest: calls.append(rest))
    Replicas(nn.Identity()).scatter((torch.ones(4, 3),), {}, [0, 1])
    assert len(calls) == 1


def test_losses_of_the_devices_become_a_vector(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """torch warns that it gathers scalars; that is what is wanted."""
    import warnings

    def gather(_: object, outputs: list[Tensor], device: object) -> Tensor:
        warnings.warn(
            "Was asked to gather along dimension 0, but all input tensors were scalars",
            stacklevel=2,
        )
        assert device == 0
        return torch.stack(outputs)

    monkeypatch.setattr(nn.DataParallel, "gather", gather)
    found = Replicas(nn.Identity()).gather([torch.tensor(1.0), torch.tensor(3.0)], 0)
    assert found.tolist() == [1.0, 3.0]
    assert not recwarn.list


def test_nothing_but_tensors_and_lists_is_shared_out() -> None:
    with pytest.raises(AssertionError, match="tensors and lists"):
        Replicas(nn.Identity()).scatter((pictures(2), 3), {}, [CPU, CPU])
