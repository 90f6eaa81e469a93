"""A workload of a few numbers: what strategies and the loop do with any model shows on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from shardmark.base.layout import Shard, StepShard
from shardmark.base.recipe import Recipe
from shardmark.ranks.measure.step.recorder import NoSpans, Spans
from shardmark.ranks.strategies.base import HeldState, RankContext, Worker
from shardmark.ranks.workloads.base import Batch, BatchPlan, LossSum, Workload
from shardmark.ranks.workloads.order import every_step

CPU = torch.device("cpu")
ALONE = RankContext(rank=0, world_size=1, local_rank=0, local_world_size=1, device=CPU)
SAMPLES = 24


@dataclass(frozen=True, slots=True)
class ToyBatch:
    inputs: Tensor
    """(n, 4)"""
    targets: Tensor
    """(n, 2)"""
    sample_ids: tuple[int, ...]
    step_weight: float
    sample_weights: tuple[float, ...]

    @property
    def weight(self) -> float:
        return sum(self.sample_weights)

    def __len__(self) -> int:
        return len(self.sample_ids)

    def to(self, device: torch.device) -> Self:
        assert device == CPU
        return self

    def split(self, parts: int) -> Sequence[Self]:
        size = len(self) // parts
        cuts = [slice(start, start + size) for start in range(0, len(self), size)]
        return [
            type(self)(
                self.inputs[c],
                self.targets[c],
                self.sample_ids[c],
                self.step_weight,
                self.sample_weights[c],
            )
            for c in cuts
        ]


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))


class Unused(nn.Module):
    """A model with a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.first(inputs))
        return outputs


class ToyWorkload(Workload):
    """A regression; sample i is the i-th row of fixed random numbers, taken in order.

    `uneven`: sample i weighs 1 + i % 5.  Unless `weights_known` the loss alone says so, and all
    that a batch has of a step's weight is its samples.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module] = plain,
        factor_of_step: Callable[[int], float] = lambda step: 1.0,  # noqa: ARG005
        *,
        uneven: bool = False,
        weights_known: bool = True,
    ) -> None:
        self.weights_known = weights_known
        self._model = model
        self._factor_of_step = factor_of_step
        self._losses_taken = 0
        drawn = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(SAMPLES, 4, generator=drawn)
        self.targets = torch.randn(SAMPLES, 2, generator=drawn)
        self.weights = [1.0 + i % 5 if uneven else 1.0 for i in range(SAMPLES)]

    training_samples = SAMPLES
    validation_samples = 6
    synthetic = True
    data_errors: Sequence[str] = ("a broken sample",)

    def build_model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(7)
            return self._model()

    def batch(self, ids: Iterable[int], of_step: Iterable[int] | None = None) -> ToyBatch:
        """These samples; without `of_step` they are the whole step."""
        rows = list(ids)
        whole = rows if of_step is None else list(of_step)
        step_weight = sum(self.weights[row] if self.weights_known else 1.0 for row in whole)
        weights = tuple(self.weights[row] for row in rows)
        return ToyBatch(self.inputs[rows], self.targets[rows], tuple(rows), step_weight, weights)

    def batches(
        self, plan: BatchPlan, shard: Shard, step_shards: Iterable[StepShard] | None = None
    ) -> Iterator[ToyBatch]:
        size = plan.global_batch // shard.count
        for step_shard in every_step(shard) if step_shards is None else step_shards:
            first = step_shard.step * plan.global_batch
            step = [(first + i) % SAMPLES for i in range(plan.global_batch)]
            start = step_shard.shard.index * size
            yield self.batch(step[start : start + size], step)

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        assert isinstance(batch, ToyBatch)
        factor = self._factor_of_step(self._losses_taken)
        self._losses_taken += 1
        errors = (model(batch.inputs).float() - batch.targets).square().mean(1)
        total = (errors * torch.tensor(batch.sample_weights)).sum() * factor
        weight = batch.weight if self.weights_known else torch.tensor(batch.weight)
        return LossSum(total=total, weight=weight, known_before=self.weights_known)

    def mean_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss that a single process would back-propagate."""
        loss = self.loss(model, batch)
        return loss.total / loss.weight

    def evaluate(self, model: nn.Module, shard: Shard, device: torch.device) -> object:
        raise NotImplementedError

    def quality(self, parts: Iterable[object]) -> Mapping[str, float | None]:
        raise NotImplementedError

    def sample_input_flops(self, model: nn.Module) -> int | None:
        raise NotImplementedError


def trained(
    worker: Worker, workload: ToyWorkload | None = None, steps: int = 2
) -> dict[str, Tensor]:
    """The parameters after steps of eight samples each."""
    workload = workload or ToyWorkload()
    for step in range(steps):
        worker.step(workload.batch(range(8 * step, 8 * step + 8)), NoSpans())
    return worker.full_parameters()


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Equal but for rounding."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.detach(), rtol=1e-6, atol=1e-7, msg=name)


def recipe(**changes: Any) -> Recipe:
    """Two steps of SGD with momentum."""
    optimizer = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    return Recipe.model_validate(
        {"global_batch": 8, "steps": 2, "optimizer": optimizer, "seed": 5, **changes}
    )


class CountingClock:
    """Each mark is one second after the one before; waiting for the device takes ten."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def mark(self) -> object:
        self.now += 1.0
        return self.now

    def seconds_between(self, start: Any, end: Any) -> float:
        return float(end - start)

    def wall_seconds(self) -> float:
        self.calls.append("wall")
        return self.now

    def unix_seconds(self) -> float:
        return 1e9 + self.now

    def synchronize(self) -> None:
        self.calls.append("wait")
        self.now += 10.0


class FakeWorker(Worker):
    """Notes what it is told; its forward pass takes two marks more."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.seeds: list[int] = []
        self.ids: list[tuple[int, ...]] = []

    def step(self, batch: Batch, recorder: Spans) -> Tensor:
        self.seeds.append(torch.initial_seed())
        self.ids.append(batch.sample_ids)
        with recorder.span("forward"):
            pass
        return torch.tensor(float(len(self.ids)))

    def set_learning_rate(self, learning_rate: float) -> None:
        self.rates.append(learning_rate)

    def skipped_steps(self) -> int:
        return 0

    def full_parameters(self) -> dict[str, Tensor]:
        return {}

    full_gradients = buffers = full_parameters

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        return {}

    def held_state(self) -> HeldState:
        return HeldState(parameters=(), gradients=(), optimizer_state=())
