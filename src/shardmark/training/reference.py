"""One process that plays all ranks in turn: what the strategies' mathematics is held against."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardmark.experiment.schema import Recipe
from shardmark.strategies._eager import autocast, build_optimizer
from shardmark.strategies._protocol import Shard
from shardmark.training.schedule import learning_rate_of, step_seed
from shardmark.workloads._protocol import BatchPlan, Workload

CPU = torch.device("cpu")


class Reference:
    """Data parallelism by its definition, on the CPU.

    Every rank's share of the batch passes through the same parameters with that rank's own
    buffers and random draws; gradients are averaged over ranks and micro-batches; one optimizer
    steps.
    """

    def __init__(
        self,
        workload: Workload,
        recipe: Recipe,
        *,
        ranks: int,
        plan: BatchPlan,
        total_steps: int,
    ) -> None:
        self._workload = workload
        self._recipe = recipe
        self._model = workload.build_model()
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = build_optimizer(self._parameters, recipe)
        self._rate = learning_rate_of(recipe, total_steps)
        shards = [Shard(index=rank, count=ranks) for rank in range(ranks)]
        self._batches = [workload.batches(plan, shard) for shard in shards]
        self._seeds = [step_seed(recipe.seed, shard_index=rank) for rank in range(ranks)]
        own = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        self._buffers = [{n: b.clone() for n, b in own.items()} for _ in range(ranks)]
        self.steps_taken = 0

    def step(self) -> list[Tensor]:
        """Take one optimizer step; each rank's mean loss, shape ()."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate(self.steps_taken)
        losses = [self._play(rank) for rank in range(len(self._batches))]
        if self._recipe.gradient_clipping is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._recipe.gradient_clipping)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.steps_taken += 1
        return losses

    def _play(self, rank: int) -> Tensor:
        """One rank's forward and backward passes; gradients add up in the parameters."""
        self._exchange(self._buffers[rank])
        torch.manual_seed(self._seeds[rank](self.steps_taken))
        micro_batches = next(self._batches[rank]).split(self._recipe.gradient_accumulation)
        losses = []
        for micro_batch in micro_batches:
            with autocast(self._recipe, CPU):
                loss = self._workload.loss(self._model, micro_batch)
            share = loss / (len(micro_batches) * len(self._batches))
            share.backward()  # type: ignore[no-untyped-call]  # torch's
            losses.append(loss.detach())
        self._exchange(self._buffers[rank])
        return torch.stack(losses).mean()

    def _exchange(self, buffers: Mapping[str, Tensor]) -> None:
        """Swap the model's buffers with a rank's."""
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                held = buffer.clone()
                buffer.copy_(buffers[name])
                buffers[name].copy_(held)

    def full_parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self._model.named_parameters()}

    def buffers(self, rank: int = 0) -> Mapping[str, Tensor]:
        """One rank's buffers by name."""
        return self._buffers[rank]
