"""A loop with dropout, and backends of torch.compile that train something else or fail."""

from __future__ import annotations

import sys
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def without_dropout(graph: torch.fx.GraphModule, _: Any) -> Any:
    for node in graph.graph.nodes:
        if "dropout" in str(node.target):
            node.replace_all_uses_with(node.args[0])
    graph.recompile()
    return graph


def of_an_evaluation(graph: torch.fx.GraphModule, _: Any) -> Any:
    for node in graph.graph.nodes:
        if "batch_norm" in str(node.target):
            node.args = (*node.args[:5], False, *node.args[6:])
    graph.recompile()
    return graph


def failing(_: Any, __: Any) -> Any:
    raise RuntimeError("no compiler is installed")


for backend in (without_dropout, of_an_evaluation, failing):
    torch._dynamo.register_backend(backend, name=backend.__name__)
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3)
model: Any = DistributedDataParallel(nn.Sequential(*layers))
if "--itself" in sys.argv:
    model.compile(backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,)))
for inputs, targets in cycle(DataLoader(data, 8)):
    optimizer.zero_grad()
    loss: Any = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
