"""Parameters that the loss does not depend on: without a gradient, in every strategy's step."""

from __future__ import annotations

from typing import Any

import pytest

from shardmark.core.errors import InputError
from shardmark.strategies import build_strategy
from shardmark.strategies.base import Server, Worker
from tests.unit.training.toy import ALONE, ToyWorkload, Unused, assert_same, recipe, trained


def worker(name: str, **options: Any) -> Worker:
    started = build_strategy(name, options).start(ToyWorkload(Unused), recipe(), ALONE)
    assert not isinstance(started, Server)
    return started


@pytest.mark.usefixtures("alone")
def test_ddp_names_them_and_its_option() -> None:
    with pytest.raises(InputError) as caught:
        trained(worker("ddp"))
    where, found, remedy = caught.value.args
    assert where == "strategy ddp"
    assert found.startswith("unused.weight, unused.bias got no gradient")
    assert "{name: ddp, find_unused_parameters: true}" in remedy


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_with_its_option_it_trains_as_one_device_does(option: str) -> None:
    """Weight decay leaves the unused layer alone."""
    parameters = trained(worker("ddp", **{option: True}))
    assert_same(parameters, trained(worker("single")))
    initial = ToyWorkload(Unused).build_model().state_dict()
    assert_same({"w": parameters["unused.weight"]}, {"w": initial["unused.weight"]})
