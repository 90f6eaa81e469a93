"""Every method of every strategy, the example of the guide included, on to the reports."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shardmark.base.errors import InputError
from shardmark.base.machine import Machine
from shardmark.base.results.schema import TrialResult
from shardmark.base.results.store import RunFolder
from shardmark.base.traffic import ModelSize
from shardmark.cli import app
from shardmark.ranks.costs import cost_model, costs_of
from shardmark.ranks.costs.base import Cell
from shardmark.ranks.strategies import STRATEGIES, build_strategy, option_names
from shardmark.ranks.strategies.base import Server
from tests import ROOT
from tests.golden.invented import EXPERIMENT, invented_trial
from tests.unit.ranks.train.toy import ALONE, ToyWorkload, Unused, assert_same, recipe, trained

GUIDE = ROOT / "docs" / "guides" / "add-a-strategy.md"
GPUS = Machine(device_type="cuda", device_count=8, cores=8)
SIZE = ModelSize(
    parameters=1000, trained_parameters=900, divided={"in": 64, "out": 64}, between_stages_bytes=8
)


@pytest.fixture(autouse=True)
def _example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The guide's strategy in the table, as it is written there."""
    examples = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    for module, code in examples:
        (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setitem(STRATEGIES, "unbucketed", import_module("unbucketed").Unbucketed)
    yield
    for module, _ in examples:
        sys.modules.pop(module, None)


def ranks_of(name: str) -> int:
    return 1 if name == "single" else 4


@pytest.mark.parametrize("name", [*STRATEGIES, "unbucketed"])
def test_every_method_of_a_strategy_returns_a_valid_value(name: str) -> None:
    strategy, ranks, asked = build_strategy(name, {}), ranks_of(name), recipe(steps=100)
    assert strategy.name == name
    assert type(strategy).__doc__
    assert strategy.unsupported_reason(ranks) is None
    strategy.check(ranks, GPUS, asked)
    layout = strategy.layout(ranks)
    assert layout.devices == ranks
    assert layout.processes == len(layout.training_ranks) + len(layout.server_ranks)
    counted = [rank.share for rank in layout.ranks if rank.counts_loss and rank.share]
    assert len(set(counted)) == len(counted) == counted[0].count, "each share once"
    assert sum(map(len, layout.ranks_by_node)) == layout.processes
    costs = costs_of(strategy)
    assert (costs is None) is (name == "unbucketed")
    if costs is not None:
        traffic = costs.required_traffic(Cell(size=SIZE, recipe=asked, world_size=ranks))
        assert traffic.formula
        assert (traffic.required_bytes > 0) is (layout.processes > 1)
    assert {strategy.backend(on, asked) for on in ("cuda", "cpu")} <= {"nccl", "gloo"}
    assert {"gradient_clipping", "mixed_precision"} <= strategy.settings(asked).keys()
    assert all(isinstance(module, str) for module in strategy.loads())
    assert "name" not in option_names(name)


def test_the_example_of_a_cost_model_counts_a_call_for_each_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy = build_strategy("unbucketed", {})
    with pytest.raises(InputError, match="there is no cost model for unbucketed"):
        cost_model(strategy)
    monkeypatch.setattr(type(strategy), "costs", "unbucketed_costs:NoSuchCosts")
    with pytest.raises(InputError, match="'unbucketed_costs:NoSuchCosts' cannot be loaded"):
        cost_model(strategy)
    monkeypatch.setattr(type(strategy), "costs", "unbucketed_costs:UnbucketedCosts")
    size = ModelSize(parameters=8, trained_parameters=8, trained_matrices=((2, 2, 2),))
    cell = Cell(size=size, recipe=recipe(), world_size=2)
    (all_reduce,) = cost_model(strategy).library_traffic(cell)
    assert (all_reduce.payload_bytes, all_reduce.calls) == (32, 2)


def result_of(name: str, ranks: int) -> TrialResult:
    strategy = build_strategy(name, {})
    costs = costs_of(strategy)
    cell = Cell(size=SIZE, recipe=recipe(), world_size=ranks)
    return invented_trial(
        name,
        ranks,
        layout=strategy.layout(ranks),
        needed_traffic=None if costs is None else costs.required_traffic(cell),
    )


def test_results_of_all_strategies_are_compared(tmp_path: Path) -> None:
    """The guide's example too, of which the reports know nothing but its results."""
    run = RunFolder.create(tmp_path / "run")
    run.write_experiment(EXPERIMENT)
    for name in (*STRATEGIES, "unbucketed"):
        result = result_of(name, ranks_of(name))
        run.create_trial(result.id)
        run.write_result(result)
    for options in (("--view", "network"), ("--view", "network", "--format", "json")):
        answer = CliRunner().invoke(app, ["compare", str(run.path), *options])
        assert answer.exit_code == 0, answer.output
    names = {row["strategy"] for row in json.loads(answer.output)["rows"]}
    assert names == {*STRATEGIES, "unbucketed"}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("unbucketed", {}),
        ("ddp", {"static_graph": True}),
        ("ddp", {"find_unused_parameters": True}),
    ],
)
def test_a_rank_alone_trains_as_one_device_does(name: str, options: dict[str, Any]) -> None:
    """Weight decay leaves a layer alone that the loss does not depend on."""
    asked = recipe(gradient_accumulation=2 if name == "unbucketed" else 1)
    workload = ToyWorkload(Unused)
    initial = workload.build_model().state_dict()["unused.weight"]
    mine, single = (
        build_strategy(*built).start(workload, asked, ALONE)
        for built in ((name, options), ("single", {}))
    )
    assert not isinstance(mine, Server)
    assert not isinstance(single, Server)
    parameters = trained(mine, workload)
    assert_same(parameters, trained(single, workload))
    assert torch.equal(parameters["unused.weight"], initial)
