"""One rank's evidence for `verify`: a few steps with everything written down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from shardmark.core.recipe import Recipe
from shardmark.core.shares import Shard, StepShard
from shardmark.equivalence.evidence import Array, RankEvidence
from shardmark.strategies.base import Worker
from shardmark.train.epochs import evaluate
from shardmark.train.identity import weights_sha256
from shardmark.train.schedule import learning_rate_of, step_shard_seed
from shardmark.workloads.base import Batch, BatchPlan, Workload


class GradientSpans:
    """Takes the gradients where a step has just finished them."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.gradients: dict[str, Tensor] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        if name == "optimizer":
            self.gradients = self._worker.full_gradients()
        yield


class NoSpans:
    @contextmanager
    def span(self, name: str) -> Iterator[None]:  # noqa: ARG002  (the protocol's signature)
        yield


def testify(
    worker: Worker,
    workload: Workload,
    recipe: Recipe,
    *,
    plan: BatchPlan,
    shard: Shard,
    steps: int,
    device: torch.device,
) -> RankEvidence:
    """Take the steps and write down what the reference can be held against.  Collective."""
    initial = weights_sha256(worker.full_parameters())
    worker.group.barrier()  # nobody changes the weights before everybody has seen them
    rate = learning_rate_of(recipe, steps)
    losses: list[float] = []
    sample_ids, rates, draws = [], [], []
    drawn = workload.watch_draws()
    tensors: dict[str, Mapping[str, Array]] = {}
    for step_shard, made in _fed(worker, workload, plan, shard, steps):
        rates.append(rate(step_shard.step))
        worker.set_learning_rate(rates[-1])
        torch.manual_seed(
            step_shard_seed(recipe.seed, step=step_shard.step, shard_index=step_shard.shard.index)
        )
        batch = made.to(device)
        spans = NoSpans() if losses else GradientSpans(worker)
        losses.append(float(worker.step(batch, spans)))
        sample_ids.append(batch.sample_ids)
        draws.append(drawn())
        if isinstance(spans, GradientSpans):
            tensors["gradient"] = arrays(spans.gradients)
            tensors["parameters after step 1"] = arrays(worker.full_parameters())
    tensors["parameters"] = arrays(worker.full_parameters())
    tensors["optimizer state"] = arrays(flat_state(worker.full_optimizer_state()))
    evaluation = evaluate(worker, workload, shard, device)
    return RankEvidence(
        initial_sha256=initial,
        sample_ids=sample_ids,
        losses=losses,
        draws=draws,
        learning_rates=rates,
        optimizer_steps=len(losses) - worker.skipped_steps(),
        buffers=arrays(worker.buffers()),
        quality=evaluation.quality,
        samples_evaluated=workload.validation_samples,
        tensors=tensors if shard.index == 0 else {},
    )


def _fed(
    worker: Worker, workload: Workload, plan: BatchPlan, shard: Shard, steps: int
) -> Iterator[tuple[StepShard, Batch]]:
    """The rank's own share of each step, or whatever step shard is left when it asks for one."""
    step_shards = worker.step_shards(steps)
    if step_shards is None:
        own = [StepShard(step=step, shard=shard) for step in range(steps)]
        yield from zip(own, workload.batches(plan, shard), strict=False)
        return
    taken: list[StepShard] = []

    def noted() -> Iterator[StepShard]:
        for step_shard in step_shards:
            taken.append(step_shard)
            yield step_shard

    for index, batch in enumerate(workload.batches(plan, shard, noted())):
        yield taken[index], batch


def arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Tensors as fp32 arrays of their own."""
    return {
        name: np.array(tensor.detach().float().cpu().numpy(), copy=True)
        for name, tensor in tensors.items()
    }


def flat_state(state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Optimizer state under `parameter/key`; counters, which have no shape, are left out."""
    return {
        f"{name}/{key}": value
        for name, keys in state.items()
        for key, value in keys.items()
        if value.dim() > 0
    }
