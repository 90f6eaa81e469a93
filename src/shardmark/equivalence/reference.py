"""One process that plays all ranks in turn: what the strategies' mathematics is held against."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor, nn

from shardmark.core.recipe import Recipe
from shardmark.core.shares import Shard
from shardmark.equivalence.capture import arrays, flat_state
from shardmark.equivalence.evidence import Evidence
from shardmark.equivalence.variation import NOTHING, Variation
from shardmark.strategies.step import autocast, build_optimizer
from shardmark.train.identity import weights_sha256
from shardmark.train.schedule import learning_rate_of, step_seed
from shardmark.workloads.base import BatchPlan, Workload

CPU = torch.device("cpu")


class Reference:
    """Data parallelism by its definition.

    Every rank's share of the batch passes through the same parameters with that rank's own
    buffers and random draws; gradients are averaged over ranks and micro-batches; one optimizer
    steps.  A `variation` makes it do something else on purpose.
    """

    def __init__(
        self,
        workload: Workload,
        recipe: Recipe,
        *,
        ranks: int,
        plan: BatchPlan,
        total_steps: int,
        device: torch.device = CPU,
        variation: Variation = NOTHING,
    ) -> None:
        self._workload = workload
        self._recipe = recipe
        self._device = device
        self._variation = variation
        self._model = workload.build_model().to(device)
        self.initial_sha256 = weights_sha256(dict(self._model.named_parameters()))
        self._named = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        self._optimizer = build_optimizer(self._named.values(), recipe)
        self._set_decay()
        self._rate = learning_rate_of(recipe, total_steps)
        shards = [Shard(index=rank, count=ranks) for rank in range(ranks)]
        drawn = replace(plan, draws=variation.seed_offset)
        self._batches = [workload.batches(drawn, shard) for shard in shards]
        draws = [0 if variation.same_draws else rank for rank in range(ranks)]
        self._seeds = [step_seed(recipe.seed, shard_index=index) for index in draws]
        own = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        self._buffers = [{n: b.clone() for n, b in own.items()} for _ in range(ranks)]
        noise = variation.noise
        self._noise = torch.Generator().manual_seed(noise.seed) if noise else None
        self.steps_taken = 0
        self.updates = 0
        self.sample_ids: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
        self.draws: list[list[tuple[str, ...]]] = [[] for _ in range(ranks)]
        self._drawn = workload.watch_draws()
        self.gradients: dict[str, Tensor] = {}
        """Averaged, not clipped; of the last step."""

    def _set_decay(self) -> None:
        decays, group = self._variation.decays, self._optimizer.param_groups[0]
        if decays is None:
            return
        named = [(p, decays(name, tuple(p.shape))) for name, p in self._named.items()]
        group["params"] = [p for p, decayed in named if decayed]
        spared = [p for p, decayed in named if not decayed]
        if spared:
            rest = {key: value for key, value in group.items() if key != "params"}
            self._optimizer.add_param_group(rest | {"params": spared, "weight_decay": 0.0})

    def step(self) -> list[Tensor]:
        """Take one optimizer step; each rank's mean loss, shape ()."""
        self._disturb_parameters()
        losses = []
        total = {name: torch.zeros_like(p) for name, p in self._named.items()}
        for rank in range(len(self._batches)):
            losses.append(self._play(rank))
            self._collect(total, rank)
        self.gradients = {name: total[name] for name, p in self._named.items() if name in total}
        self._update()
        self.steps_taken += 1
        return losses

    def _collect(self, total: dict[str, Tensor], rank: int) -> None:
        """Add one rank's gradient to the average, as the variation would reduce it."""
        variation = self._variation
        for name, parameter in self._named.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is None or variation.only_rank not in (None, rank):
                continue
            share = 1 if variation.only_rank is not None else len(self._batches)
            part = gradient / share * variation.gradient_factor
            if variation.reduction is not None:
                part = (total[name] + part.to(variation.reduction).float()).to(variation.reduction)
                total[name] = part.float()
            else:
                total[name] += part

    def _update(self) -> None:
        for name, parameter in self._named.items():
            gradient = self.gradients[name]
            if self._noise is not None and self._variation.noise is not None:
                gradient = self._disturbed(gradient, self._variation.noise.gradients)
                self.gradients[name] = gradient
            parameter.grad = gradient.clone()
        clipping = self._variation.clipping or self._recipe.gradient_clipping
        if clipping is not None:
            nn.utils.clip_grad_norm_(self._named.values(), clipping)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate(self.steps_taken)
        if self.steps_taken not in self._variation.skipped:
            self._optimizer.step()
            self.updates += 1
        self._optimizer.zero_grad(set_to_none=True)
        if self._variation.masters is not None:
            with torch.no_grad():
                for parameter in self._named.values():
                    parameter.copy_(parameter.to(self._variation.masters))

    def _play(self, rank: int) -> Tensor:
        """One rank's forward and backward passes, its gradient left in the parameters."""
        giver = 0 if self._variation.buffers == "broadcast" else rank
        given = {name: b.clone() for name, b in self._buffers[giver].items()}
        self._put(given)
        torch.manual_seed(self._seeds[rank](self.steps_taken + self._variation.seed_offset))
        batch = next(self._batches[rank]).to(self._device)
        self.sample_ids[rank].append(batch.sample_ids)
        micro_batches = batch.split(self._recipe.gradient_accumulation)
        losses = []
        for micro_batch in micro_batches:
            with self._precision():
                loss = self._workload.loss(self._model, micro_batch)
            share = loss / len(micro_batches)
            share.backward()  # type: ignore[no-untyped-call]  # torch's
            losses.append(loss.detach())
        self.draws[rank].append(self._drawn())
        if self._variation.buffers != "frozen":
            self._buffers[rank] = {n: b.clone() for n, b in self._model.named_buffers()}
        return torch.stack(losses).mean()

    def _precision(self) -> AbstractContextManager[object]:
        if self._variation.compute is not None:
            return torch.autocast(self._device.type, dtype=self._variation.compute)
        return autocast(self._recipe, self._device)

    def _disturb_parameters(self) -> None:
        if self._noise is not None and self._variation.noise is not None:
            with torch.no_grad():
                for parameter in self._named.values():
                    disturbed = self._disturbed(parameter, self._variation.noise.parameters)
                    parameter.copy_(disturbed)

    def _disturbed(self, tensor: Tensor, size: float) -> Tensor:
        assert self._noise is not None, "the caller looked"
        draws = torch.randn(tensor.shape, generator=self._noise).to(tensor.device)
        return tensor * (1 + size * draws)

    def _put(self, buffers: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                buffer.copy_(buffers[name])

    def full_parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().cpu().clone() for name, p in self._model.named_parameters()}

    def buffers(self, rank: int = 0) -> Mapping[str, Tensor]:
        """One rank's buffers by name."""
        return self._buffers[rank]

    def quality(self) -> Mapping[str, float | None]:
        """The whole validation set once, with the buffers of the rank that is evaluated."""
        self._put(self._buffers[self._variation.evaluated_rank])
        self._model.eval()
        part = self._workload.evaluate(self._model, Shard(index=0, count=1), self._device)
        self._model.train()
        return self._workload.quality([part])

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        state = self._optimizer.state
        return {
            name: {k: v for k, v in state.get(p, {}).items() if isinstance(v, Tensor)}
            for name, p in self._named.items()
        }


def reference_evidence(
    workload: Workload,
    recipe: Recipe,
    *,
    ranks: int,
    plan: BatchPlan,
    steps: int,
    device: torch.device = CPU,
    variation: Variation = NOTHING,
) -> Evidence:
    """The reference's steps, or a variation's, written down as a strategy's would be."""
    alone = Reference(
        workload,
        recipe,
        ranks=ranks,
        plan=plan,
        total_steps=steps,
        device=device,
        variation=variation,
    )
    tensors = {}
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for step in range(steps):
        for rank, loss in enumerate(alone.step()):
            losses[rank].append(float(loss))
        if step == 0:
            tensors["gradient"] = arrays(alone.gradients)
            tensors["parameters after step 1"] = arrays(alone.full_parameters())
    tensors["parameters"] = arrays(alone.full_parameters())
    tensors["optimizer state"] = arrays(flat_state(alone.optimizer_state()))
    rate = learning_rate_of(recipe, steps)
    return Evidence(
        initial_sha256=(alone.initial_sha256,) * ranks,
        sample_ids=tuple(tuple(ids) for ids in alone.sample_ids),
        losses=tuple(tuple(values) for values in losses),
        draws=tuple(tuple(drawn) for drawn in alone.draws),
        learning_rates=tuple(rate(step) for step in range(steps)),
        optimizer_steps=alone.updates,
        tensors=tensors,
        buffers=tuple(arrays(dict(alone.buffers(rank))) for rank in range(ranks)),
        quality=alone.quality(),
        samples_evaluated=workload.validation_samples,
    )
