"""Local SGD and DiLoCo on two ranks are the algorithms of their papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardmark.base.layout import Shard
from shardmark.ranks.measure.step.recorder import NoSpans
from shardmark.ranks.strategies import build_strategy
from shardmark.ranks.strategies.base import RankContext, Server
from shardmark.ranks.workloads.base import BatchPlan
from tests.distributed.ranks import run_ranks
from tests.unit.ranks.train.toy import ToyWorkload, assert_same, plain, recipe

STEPS = 5
OPTIONS: dict[str, dict[str, Any]] = {
    "local-sgd": {"period_steps": 2},
    "diloco": {"period_steps": 2, "outer_learning_rate": 0.5, "outer_momentum": 0.8},
}


def trained(process: RankContext) -> dict[str, dict[str, Tensor]]:
    """Outer parameters, or the mean, after five steps."""
    parameters = {}
    for name, options in OPTIONS.items():
        workload = ToyWorkload(plain)
        worker = build_strategy(name, options).start(workload, recipe(), process)
        assert not isinstance(worker, Server)
        shard = Shard(index=process.rank, count=process.world_size)
        batches = workload.batches(BatchPlan(global_batch=8, seed=5), shard)
        for _ in range(STEPS):
            worker.step(next(batches), NoSpans())
        parameters[name] = dict(worker.full_parameters())
    return parameters


def by_the_paper(name: str) -> dict[str, Tensor]:
    """Algorithm 1 of Douillard et al. in plain torch; with the mean for an update, local SGD."""
    workload = ToyWorkload(plain)
    outer = workload.build_model()
    slow = torch.optim.SGD(outer.parameters(), lr=0.5, momentum=0.8, nesterov=True)
    models = [workload.build_model() for _ in range(2)]
    inner = [
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01) for m in models
    ]
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            first = (8 * step + 4 * rank) % 24
            optimizer.zero_grad()
            workload.mean_loss(model, workload.batch(range(first, first + 4))).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if step % 2 == 0 and (name == "diloco" or step < STEPS - 1):
            continue
        with torch.no_grad():
            for own, *others in zip(
                outer.parameters(), *(m.parameters() for m in models), strict=True
            ):
                mean = sum(others) / 2
                own.grad = own - mean
                if name == "local-sgd":
                    own.copy_(mean)
        if name == "diloco":
            slow.step()
        for model in models:
            model.load_state_dict(outer.state_dict())
    return {key: parameter.detach() for key, parameter in outer.named_parameters()}


def test_parameters_equal_those_of_the_papers_algorithm(tmp_path: Path) -> None:
    """After five steps: the mean of the ranks, or the outer parameters of the second meeting."""
    for parameters in run_ranks(trained, world_size=2, directory=tmp_path):
        for name in OPTIONS:
            assert_same(parameters[name], by_the_paper(name))
