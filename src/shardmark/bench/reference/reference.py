"""The reference: one process that simulates all ranks in turn, by the definition of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardmark.base.errors import InputError
from shardmark.base.evidence.captures import PARTS, Array, Capture, Tolerances
from shardmark.base.layout import Shard, StepShard
from shardmark.base.numerics import ONE_DEVICE, Numerics
from shardmark.base.recipe import Recipe
from shardmark.bench.reference.capture import arrays, data_set_of, flat_state
from shardmark.bench.reference.compare import QualityTolerances
from shardmark.bench.reference.lockstep import Lockstep, OutOfStepError
from shardmark.bench.reference.power_sgd import ReferencePowerSGD
from shardmark.ranks.strategies.blocks import sharding_units
from shardmark.ranks.strategies.casting import (
    allow_mixed_dtype_batch_norm,
    cast_parameters,
    lossless_copy,
)
from shardmark.ranks.strategies.execution import prepared_on
from shardmark.ranks.strategies.step import (
    autocast,
    build_optimizer,
    check_weight,
    loss_scaler,
    set_learning_rates,
    share_of_step,
    switch_weights,
)
from shardmark.ranks.train.exchanged_group import CannotPlayError, Players, world_of
from shardmark.ranks.train.one_rank import one_rank
from shardmark.ranks.train.record import weights_sha256
from shardmark.ranks.train.schedule import learning_rate_of, seed_step, set_numerics
from shardmark.ranks.trial import Trial
from shardmark.ranks.workloads.base import Batch, BatchPlan, Workload

CPU = torch.device("cpu")

PERTURBED_RUNS = 3

ALIGNMENT = 2
"""DeepSpeed pads the flat parameters to a multiple of this number of elements for each rank."""

REDUCTIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

UNIT_ROUNDOFF = {"fp32": 2.0**-24, "tf32": 2.0**-11, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Half of the distance from 1 to the next larger number (IEEE 754; bfloat16: 8 bits, TF32: 11)."""

EXPLAINED = 0.01
"""Largest fraction of the deviation that may remain under a hypothesis that explains it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A way in which a training can differ from its definition.

    A run of the reference with it shows if it explains a deviation.  The default values of the
    fields are the definition.
    """

    text: str = "as defined"
    """Name of the cause."""
    setting: str | None = None
    """The setting that causes the difference, if there is one."""
    leaves_at_most: float = EXPLAINED
    """Fraction of the deviation that may remain."""
    compares: frozenset[str] | None = None
    """Names of the compared checks; None compares every check with a tolerance."""
    gradient_factor: float = 1.0
    """Factor of the averaged gradient, applied before clipping and the update."""
    clipping: float | None = None
    """Largest 2-norm of the gradient; None takes the recipe's value."""
    sync_batch_norm: bool | None = None
    """True if batch norm takes its statistics over all ranks; None takes the recipe's value."""
    unused_as_zero: bool = False
    """True if parameters that no rank used are updated as with a gradient of zero."""
    decays: Callable[[str, tuple[int, ...]], bool] | None = None
    """Returns True for names and shapes of parameters with weight decay; None decays all."""
    one_group: bool = False
    """True if the task's parameter groups are ignored: the recipe's settings hold for all."""
    only_rank: int | None = None
    """Rank whose gradient is used alone, without averaging; None averages all."""
    reduction: torch.dtype | None = None
    """Type in which the ranks' gradients are added up; None takes the strategy's type."""
    one_device: bool = False
    """True to compute as one device does, instead of by the strategy's numerics."""
    masters: torch.dtype | None = None
    """Type to which parameters are rounded after every update."""
    compute: torch.dtype | None = None
    """Type of an autocast around the forward and backward passes."""
    skipped: frozenset[int] = frozenset()
    """Steps whose update is left out."""
    seed_offset: int = 0
    """Offset of the seeds of random draws (dropout, proposals)."""
    same_draws: bool = False
    """True if every rank draws the same random numbers as rank 0."""
    buffers: Literal["separate", "broadcast", "frozen"] = "separate"
    """Each rank updates its buffers, all get rank 0's before each pass, or no buffer changes."""
    divisor: Literal["step", "share", "micro-batch"] = "step"
    """Weight that divides the loss of a micro-batch; all values but `step` give a mean of means."""
    evaluated_rank: int = 0
    """Rank whose buffers are evaluated."""
    evaluated_in_shares: bool = False
    """True if each rank evaluates its samples alone, on a model that evaluation changes."""
    flat_pieces: bool = False
    """True if the optimizer updates equal pieces of the flat parameters, one for each rank."""
    first_round_of: int | None = None
    """Rank whose parameters alone are used at the end of the first round of local steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Standard deviations of random relative errors of each element (Parker 1997)."""

    seed: int
    parameters: float
    gradients: float


AS_DEFINED = Hypothesis()

Parts = Sequence[tuple[Batch, float]]
"""Micro-batches of a rank with their weights."""


class CommunicatesError(Exception):
    """Raised if the task calls a collective while the ranks are simulated one after the other."""


@dataclass(kw_only=True, eq=False)
class Reference:
    """Data parallelism by its definition.

    Each distinct share of the batch passes through the same parameters, with the buffers and the
    random draws of its rank.  The sum of the losses is divided by the weight of the full step, and
    one optimizer takes a step.  If batch norm takes its statistics over all ranks, the shares pass
    at the same time, and each rank has its modules, which share the parameters.  `numerics` are
    those of the strategy.  A `hypothesis` makes the training deviate on purpose; `noise` perturbs
    it as rounding does.
    """

    workload: Workload = field(kw_only=False)
    recipe: Recipe = field(kw_only=False)
    shares: int
    plan: BatchPlan
    total_steps: int
    device: torch.device = CPU
    numerics: Numerics = ONE_DEVICE
    hypothesis: Hypothesis = AS_DEFINED
    noise: Noise | None = None
    ranks: Sequence[int] | None = None
    """The ranks whose gradients are averaged; None averages all."""
    communicates: bool = False
    """True if the task calls collectives: the ranks are then simulated at the same time."""

    def __post_init__(self) -> None:
        workload, recipe, hypothesis = self.workload, self.recipe, self.hypothesis
        numerics = ONE_DEVICE if hypothesis.one_device else self.numerics
        self._reduction = hypothesis.reduction or REDUCTIONS[numerics.reduction_precision]
        chosen = numerics.power_sgd
        self._power_sgd = None if chosen is None else ReferencePowerSGD(chosen)
        played = range(self.shares) if self.ranks is None else self.ranks
        seed = (self.noise.seed if self.noise else 0) + self.shares * played[0]
        self._noise_draws = torch.Generator().manual_seed(seed)
        self._casts = numerics.casts
        self._messages = REDUCTIONS[numerics.message_precision]
        synchronised = hypothesis.sync_batch_norm
        if synchronised is None:
            synchronised = recipe.sync_batch_norm
        self._synchronised = synchronised and len(played) > 1
        if self.communicates and (self._synchronised or len(played) < self.shares):
            local = "local steps, in which ranks train alone"
            raise CannotPlayError(
                "collectives beside " + ("synchronised batch norm" if synchronised else local)
            )
        together = self._synchronised or self.communicates
        self._lockstep = Lockstep(len(played), self.device) if together else None
        self._current_alone = played[0]
        self.players = Players(self.shares, self._exchange, self._current_rank)
        """The simulated ranks, as the task sees them."""
        self.models, self._draw_readers = self._build_models(len(played))
        self.model = self.models[0]
        set_numerics(recipe)
        self.initial_sha256 = weights_sha256(
            (name, lossless_copy(p)) for name, p in sorted(self.model.named_parameters())
        )
        self._named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        groups = () if hypothesis.one_group else workload.parameter_groups
        self._optimizer = build_optimizer(self._named, recipe, groups)
        self._set_decay()
        self._piece_optimizer: torch.optim.Optimizer | None = None
        self._scaler = loss_scaler(recipe, self.device)
        self._rate = learning_rate_of(recipe, self.total_steps)
        self._shards = [Shard(index=index, count=self.shares) for index in played]
        self._draws_plan = replace(self.plan, draws=hypothesis.seed_offset)
        self._batches = [workload.batches(self._draws_plan, shard) for shard in self._shards]
        initial = dict(self.model.named_buffers())
        self._buffers = [{n: b.clone() for n, b in initial.items()} for _ in self._shards]
        self.steps_taken = 0
        self._parts: Sequence[Parts] = ()
        """Micro-batches of each rank in the step under way."""
        self._weights_from_losses = not workload.weights_known
        """True if the weights are known only after the losses are computed."""
        self.skipped: list[int] = []
        """Steps whose scaled gradients were not finite, or that a hypothesis skips."""
        self.sample_ids: list[list[tuple[int, ...]]] = [[] for _ in self._shards]
        self.weights: list[list[float]] = [[] for _ in self._shards]
        self.draws: list[list[tuple[str, ...]]] = [[] for _ in self._shards]
        self.gradients: dict[str, Tensor] = {}
        """Gradients of the last step before clipping.  They are scaled like the loss until the
        update.  A parameter that no rank used has no gradient."""

    def _build_models(
        self, ranks: int
    ) -> tuple[list[nn.Module], list[Callable[[], tuple[str, ...]]]]:
        """Return each rank's model, and the function that returns its latest random draws.

        The ranks share one model and function, unless they are simulated at the same time.
        """
        models: list[nn.Module] = []
        draw_readers: list[Callable[[], tuple[str, ...]]] = []
        for rank in range(1 if self._lockstep is None else ranks):
            with world_of(self.players):  # the task may ask for the number of ranks
                model = self.workload.build_model()
            model = prepared_on(self.device, model, self.workload, self.recipe)
            models.append(model)
            draw_readers.append(self.workload.watch_draws())
            if self._casts is not None:
                allow_mixed_dtype_batch_norm(model)
            if self._lockstep is not None:
                if self._synchronised:
                    self._lockstep.synchronise(model, rank)
                for copied, first in zip(model.parameters(), models[0].parameters(), strict=True):
                    copied.data = first.data
        copies = ranks // len(models)
        return models * copies, draw_readers * copies

    def _set_decay(self) -> None:
        decays = self.hypothesis.decays
        if decays is None:
            return
        decayed = {p for name, p in self._named.items() if decays(name, tuple(p.shape))}
        for group in list(self._optimizer.param_groups):
            spared = [p for p in group["params"] if p not in decayed]
            group["params"] = [p for p in group["params"] if p in decayed]
            if spared:
                rest = {key: value for key, value in group.items() if key != "params"}
                self._optimizer.add_param_group(rest | {"params": spared, "weight_decay": 0.0})

    @property
    def all_buffers(self) -> Sequence[Mapping[str, Tensor]]:
        """Buffers of every rank, by name."""
        return self._buffers

    def restart(self, buffers: Sequence[Mapping[str, Tensor]]) -> None:
        """Go back to the first batch with these buffers of the ranks; keep the weights."""
        self._buffers = [
            {n: b.clone() for n, b in rank_buffers.items()} for rank_buffers in buffers
        ]
        self._batches = [self.workload.batches(self._draws_plan, s) for s in self._shards]

    def _exchange(self, name: str, value: object) -> list[object]:
        if self.shares == 1:
            return [value]
        if self._lockstep is None or not self.communicates:
            raise CommunicatesError(name)
        if not self._lockstep.is_running:
            raise CannotPlayError(f"{name} while its model is built, or in after_step")
        try:
            return self._lockstep.exchange(self._lockstep.current, name, value)
        except OutOfStepError as error:
            raise CannotPlayError(f"{name} on some of the ranks") from error

    def _current_rank(self) -> int:
        if self.communicates and self._lockstep is not None and not self._lockstep.is_running:
            # The task may store the number, but all ranks share one task here.
            raise CannotPlayError("its rank while its model is built, or in after_step")
        return self._current_alone if self._lockstep is None else self._lockstep.current

    def step(self) -> list[Tensor]:
        """Take one optimizer step and return each rank's loss, as a worker does."""
        if self.noise is not None:
            with torch.no_grad():
                for parameter in self._named.values():
                    parameter.copy_(self._perturbed(parameter, self.noise.parameters))
        with self._pulled_parameters():
            losses = self.compute_gradients()
        self._update()
        self.steps_taken += 1
        if self.workload.has_after_step:
            self._call_hook()
        return losses

    @torch.no_grad()
    def _call_hook(self) -> None:
        """Call the task's `after_step` for each rank, with its buffers and the same parameters.

        Raises `InputError` if ranks would get different frozen parameters.
        """
        frozen = {n: p for n, p in self.model.named_parameters() if not p.requires_grad}
        before = {name: parameter.clone() for name, parameter in frozen.items()}
        first: dict[str, Tensor] = {}
        for rank, shard in enumerate(self._shards):
            model = self.models[rank]
            self._current_alone = shard.index
            put_buffers(model, self._buffers[rank])
            for name, parameter in frozen.items():
                parameter.copy_(before[name])
            self.workload.after_step(model, self.steps_taken)
            self._buffers[rank] = {n: b.clone() for n, b in model.named_buffers()}
            first = first or {name: parameter.clone() for name, parameter in frozen.items()}
            for name, parameter in frozen.items():
                if not torch.allclose(parameter, first[name], rtol=0, atol=0, equal_nan=True):
                    raise InputError(
                        "workload.task",
                        f"after_step makes {name} different on ranks 0 and {shard.index}",
                        "compute frozen parameters from parameters alone, and keep what belongs to"
                        " a rank in buffers",
                    )

    @contextmanager
    def _pulled_parameters(self) -> Iterator[None]:
        """Round parameters to the precision of messages in the block, after the first update."""
        if self._messages is torch.float32 or not self.steps_taken:
            yield
            return
        exact = {name: parameter.detach().clone() for name, parameter in self._named.items()}
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(exact[name].to(self._messages))
        yield
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(exact[name])

    def compute_gradients(self) -> list[Tensor]:
        """Run every rank's passes, set `gradients`, and return each rank's loss; update nothing."""
        self.gradients = {}
        count, ranks = self.recipe.gradient_accumulation, range(len(self._shards))
        batches = [next(batches).to(self.device) for batches in self._batches]
        self._parts = [[(part, part.weight) for part in batch.split(count)] for batch in batches]
        if self._weights_from_losses:
            play = self._lockstep.run if self._lockstep else lambda weigh: [*map(weigh, ranks)]
            self._parts = play(self._weigh)
        losses = [] if self._lockstep is None else self._lockstep.run(self._play)
        for rank in ranks:
            if self._lockstep is None:
                losses.append(self._play(rank))
            self._collect(self.gradients, rank)
        if self._casts is not None:
            dtype = REDUCTIONS[self._casts.gradients]
            self.gradients = {n: g.to(dtype).float() for n, g in self.gradients.items()}
        if self._power_sgd is not None:
            if self.noise is not None:
                for name, gradient in self.gradients.items():
                    self.gradients[name] = self._perturbed(gradient, self.noise.gradients)
            self._power_sgd.reduce(self.gradients)
        return losses

    def _begin(self, rank: int) -> nn.Module:
        """Return the model with the rank's buffers, ready to draw what the rank draws."""
        hypothesis, model = self.hypothesis, self.models[rank]
        self._current_alone = self._shards[rank].index
        put_buffers(model, self._buffers[0 if hypothesis.buffers == "broadcast" else rank])
        drawing = self._shards[0 if hypothesis.same_draws else rank]
        step_shard = StepShard(step=self.steps_taken + hypothesis.seed_offset, shard=drawing)
        seed_step(self.recipe.seed, step_shard, (self.device,))
        return model

    def _weigh(self, rank: int) -> Parts:
        """Return the rank's parts with the weights of their losses, from a forward pass alone.

        A backward pass needs the weight of the step, the sum over all ranks.
        """
        model, parts = self._begin(rank), [part for part, _ in self._parts[rank]]
        with self._cast_parameters(model), self._precision():
            return [(part, float(self.workload.loss(model, part).weight)) for part in parts]

    def _play(self, rank: int) -> Tensor:
        """Run one rank's forward and backward passes, leaving the gradient in the parameters."""
        model, micro_batches = self._begin(rank), self._parts[rank]
        ids = chain.from_iterable(batch.sample_ids for batch, _ in micro_batches)
        self.sample_ids[rank].append(tuple(ids))
        share_weight = _sum_of(micro_batches)
        self.weights[rank].append(share_weight)
        parts = []
        added: dict[str, Tensor] = {}
        with self._cast_parameters(model):
            for micro_batch, weight in micro_batches:
                with self._precision():
                    loss = self.workload.loss(model, micro_batch)
                self._weights_from_losses = not loss.known_before
                if not self._weights_from_losses:
                    check_weight(loss, micro_batch)
                step_weight = self._step_weight(micro_batch, weight, share_weight)
                part = share_of_step(loss, step_weight, self.shares)
                self._backward(part, rank)
                parts.append(part.detach())
                self._take_cast_gradients(model, added)
        for name, parameter in model.named_parameters():
            if name in added:
                parameter.grad = added[name].float()
        self.draws[rank].append(self._draw_readers[rank]())
        if self.hypothesis.buffers != "frozen":
            self._buffers[rank] = {n: b.clone() for n, b in model.named_buffers()}
        return torch.stack(parts).sum()

    def _backward(self, part: Tensor, rank: int) -> None:
        """Run the backward pass; once for all ranks if their batch norms are synchronised."""
        if self._lockstep is not None and self._synchronised:
            parts, first_row = self._lockstep.gather(rank, part.reshape(1))
            if first_row > 0:
                return
            part = parts.sum()
        # A backward pass may wait for other ranks, so it must not block torch's shared threads.
        with torch.autograd.set_multithreading_enabled(not self.communicates):
            self._scaler.scale(part).backward()  # type: ignore[no-untyped-call]  # torch's

    def _step_weight(self, batch: Batch, weight: float, share_weight: float) -> float:
        """Return the weight of the step, or the divisor of the hypothesis.

        If weights are known from losses only, the other shares are assumed to weigh as much as the
        simulated ones.
        """
        ranks, parts = self.shares, self.recipe.gradient_accumulation
        played = sum(map(_sum_of, self._parts)) * ranks / len(self._shards)
        divisors = {
            "step": played if self._weights_from_losses else batch.step_weight,
            "share": ranks * share_weight,
            "micro-batch": ranks * parts * weight,
        }
        return divisors[self.hypothesis.divisor] or math.inf

    def _precision(self) -> AbstractContextManager[object]:
        if self.hypothesis.compute is not None:
            return torch.autocast(self.device.type, dtype=self.hypothesis.compute)
        return autocast(self.recipe, self.device) if self._casts is None else nullcontext()

    def _cast_parameters(self, model: nn.Module) -> AbstractContextManager[object]:
        if self._casts is None:
            return nullcontext()
        units = sharding_units(model, self._casts.units, self.workload.blocks(model))
        return cast_parameters(model, units, REDUCTIONS[self._casts.precision])

    def _take_cast_gradients(self, model: nn.Module, added: dict[str, Tensor]) -> None:
        """Add a micro-batch's gradients as a strategy that casts parameters does."""
        if self._casts is None:
            return
        dtype = REDUCTIONS[self._casts.gradients]
        for name, parameter in model.named_parameters():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                gradient = gradient.to(dtype)
                added[name] = added[name] + gradient if name in added else gradient

    def _collect(self, total: dict[str, Tensor], rank: int) -> None:
        """Add one rank's gradient to the average, as the hypothesis would reduce it."""
        hypothesis = self.hypothesis
        for name, parameter in self.models[rank].named_parameters():
            gradient, parameter.grad = parameter.grad, None
            if gradient is None or hypothesis.only_rank not in (None, rank):
                continue
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            total.setdefault(name, torch.zeros_like(gradient))
            share = 1 if hypothesis.only_rank is not None else len(self._shards)
            # As torch's hooks do, cast to 16 bits before the division.
            sent = narrowed(gradient, self._messages).to(gradient.dtype)
            part = narrowed(sent, self._reduction) / share * hypothesis.gradient_factor
            added = narrowed(total[name], self._reduction) + part
            total[name] = added.to(gradient.dtype)

    def _update(self) -> None:
        hypothesis = self.hypothesis
        for name, gradient in self.gradients.items():
            self._named[name].grad = gradient
        self._scaler.unscale_(self._optimizer)  # changes gradients in place
        for name, gradient in self.gradients.items():
            if self.noise is not None:
                self.gradients[name] = self._perturbed(gradient, self.noise.gradients)
            self._named[name].grad = self.gradients[name].clone()
        if hypothesis.unused_as_zero:
            for parameter in self._named.values():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        clipping = hypothesis.clipping or self.recipe.gradient_clipping
        if clipping is not None:
            nn.utils.clip_grad_norm_(self._named.values(), clipping)
        set_learning_rates(self._optimizer.param_groups, self._rate(self.steps_taken))
        scale = self._scaler.get_scale()
        if hypothesis.flat_pieces:
            self._step_in_pieces()
        elif self.steps_taken not in hypothesis.skipped:
            self._scaler.step(self._optimizer)
        self._scaler.update()
        if self.steps_taken in hypothesis.skipped or self._scaler.get_scale() < scale:
            self.skipped.append(self.steps_taken)
        self._optimizer.zero_grad(set_to_none=True)
        if hypothesis.masters is not None:
            with torch.no_grad():
                for parameter in self._named.values():
                    parameter.copy_(parameter.to(hypothesis.masters))

    @torch.no_grad()
    def _step_in_pieces(self) -> None:
        rows = [group["params"] for group in self._optimizer.param_groups]
        if self._piece_optimizer is None:
            pieces = [[nn.Parameter(p.clone()) for p in self._pieces(row)] for row in rows]
            groups = zip(self._optimizer.param_groups, pieces, strict=True)
            optimizer_class: Any = type(self._optimizer)
            self._piece_optimizer = optimizer_class(
                [group | {"params": piece} for group, piece in groups]
            )
        set_learning_rates(self._piece_optimizer.param_groups, self._rate(self.steps_taken))
        for row, group in zip(rows, self._piece_optimizer.param_groups, strict=True):
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in row]
            for piece, gradient in zip(group["params"], self._pieces(gradients), strict=True):
                piece.grad = gradient
        self._piece_optimizer.step()
        for row, group in zip(rows, self._piece_optimizer.param_groups, strict=True):
            updated = torch.cat(group["params"])
            for parameter in row:
                parameter.copy_(updated[: parameter.numel()].view_as(parameter))
                updated = updated[parameter.numel() :]

    def _pieces(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return equal pieces of the flattened and padded tensors."""
        row = torch.cat([tensor.reshape(-1) for tensor in tensors])
        padding = row.new_zeros(-len(row) % (ALIGNMENT * self.shares))
        return torch.cat([row, padding]).chunk(self.shares)

    def _perturbed(self, tensor: Tensor, size: float) -> Tensor:
        draws = torch.randn(tensor.shape, generator=self._noise_draws).to(tensor.device)
        return (tensor * (1 + size * draws)).to(tensor.dtype)

    def full_parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().cpu().clone() for name, p in self.model.named_parameters()}

    def buffers(self, rank: int = 0) -> Mapping[str, Tensor]:
        """Return the buffers of a rank by name."""
        return self._buffers[rank]

    def quality(self) -> Mapping[str, float | None]:
        """Evaluate the full validation set once, with the buffers of the evaluated rank."""
        model = self.model
        switch_weights(self._optimizer, "eval")
        if self.recipe.weights != "fp32":  # evaluations compute in fp32
            model = self.workload.build_model()
            model.load_state_dict(self.full_parameters(), strict=False)
            model.to(self.device)
        count = self.shares if self.hypothesis.evaluated_in_shares else 1
        parts = []
        for index in range(count):
            put_buffers(model, self._buffers[self.hypothesis.evaluated_rank])
            model.eval()
            with one_rank():
                shard = Shard(index=index, count=count)
                parts.append(self.workload.evaluate(model, shard, self.device))
        model.train()
        switch_weights(self._optimizer, "train")
        return self.workload.quality(parts)

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        state = self._optimizer.state
        return {
            name: {k: v for k, v in state.get(p, {}).items() if isinstance(v, Tensor)}
            for name, p in self._named.items()
        }

    def skipped_by_share(self) -> tuple[tuple[int, ...], ...]:
        return (tuple(self.skipped),) * len(self._shards)

    def capture(self, steps: int) -> Capture:
        """Take the steps and return their capture, in the form of a strategy's capture."""
        tensors: dict[str, Mapping[str, Array]] = {part: {} for part in PARTS}
        losses: list[list[float]] = [[] for _ in self._shards]
        for step in range(steps):
            with world_of(self.players):
                losses_of_step = self.step()
            for rank, loss in enumerate(losses_of_step):
                losses[rank].append(float(loss))
            # The first update; a step that the hypothesis skips counts as an update.
            overflowed = step in {*self.skipped} - self.hypothesis.skipped
            if not tensors["gradient"] and not overflowed:
                tensors["gradient"] = arrays(self.gradients)
                tensors["parameters after the first update"] = arrays(self.full_parameters())
        tensors["parameters"] = arrays(self.full_parameters())
        tensors["optimizer state"] = arrays(flat_state(self.optimizer_state()))
        return Capture(
            initial_sha256=(self.initial_sha256,) * len(self._shards),
            data_set=(data_set_of(self.workload),) * len(self._shards),
            sample_ids=tuple(map(tuple, self.sample_ids)),
            weights=tuple(map(tuple, self.weights)),
            losses=tuple(map(tuple, losses)),
            draws=tuple(map(tuple, self.draws)),
            learning_rates=tuple(map(self._rate, range(steps))),
            skipped=self.skipped_by_share(),
            tensors=tensors,
            buffers=tuple(arrays(buffers) for buffers in self._buffers),
            quality=self.quality(),
            samples_evaluated=self.workload.validation_samples,
        )


def narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast the tensor to a 16-bit type; fp32 leaves it unchanged, as float64 would lose digits."""
    return tensor if dtype is torch.float32 else tensor.to(dtype)


def _sum_of(parts: Parts) -> float:
    return sum(weight for _, weight in parts)


@torch.no_grad()
def put_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Give the model these buffers; a step may have created, resized or removed some of them."""
    current = dict(model.named_buffers())
    for name in current.keys() | buffers.keys():
        buffer, stored = current.get(name), buffers.get(name)
        if buffer is not None and stored is not None:
            if buffer.shape != stored.shape:
                buffer.data = torch.empty_like(stored)
            buffer.copy_(stored)
            continue
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, None if stored is None else stored.clone())


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRuns:
    """Runs references of one trial: its workload, recipe and number of distinct shares."""

    workload: Workload
    trial: Trial
    shares: int
    steps: int
    device: torch.device
    threads: int = 1
    """Threads of each process of the strategy: their number changes the order of additions."""
    communicates: bool = False
    """True if the task calls collectives, as in `Reference`."""

    def run(self, hypothesis: Hypothesis = AS_DEFINED, noise: Noise | None = None) -> Capture:
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            numerics = self.trial.built_strategy.numerics(self.trial.recipe)
            reference_class = Reference
            if numerics.local_steps is not None and not hypothesis.one_device:
                from shardmark.bench.reference.local_reference import LocalReference

                reference_class = LocalReference
            return reference_class(
                self.workload,
                self.trial.recipe,
                shares=self.shares,
                plan=self.plan,
                total_steps=self.steps,
                device=self.device,
                numerics=numerics,
                hypothesis=hypothesis,
                noise=noise,
                communicates=self.communicates,
            ).capture(self.steps)
        finally:
            torch.set_num_threads(threads)

    def tolerances(self) -> Tolerances:
        """Return the reference with its deviations under perturbations of the size of rounding.

        A result of n added terms has a relative error of about sqrt(n) u (Higham, Accuracy and
        Stability of Numerical Algorithms, 2nd ed., section 2.8).  Forward and backward passes add
        up as many terms as the widest layer has inputs; the reduction adds up one term for each
        rank and micro-batch.

        A model may amplify such errors until they hide a factor of two.  Detectors do: if two
        nearly equal scores change places, other boxes are selected.  Then only gradients are
        perturbed, as by reductions, and the first forward pass must be equal bit by bit.

        The first of the perturbed runs has no perturbation: it shows if the task is repeatable.
        """
        compute, reduction = self._roundoffs()

        def perturbed(seeds: Sequence[int], parameters: float) -> list[Capture]:
            noises = (
                Noise(seed=seed, parameters=parameters, gradients=compute + reduction)
                for seed in seeds
            )
            return [self.run(noise=noise) for noise in noises]

        reference, again = self.run(), self.run()
        first = QualityTolerances(
            reference=reference,
            unperturbed=reference,
            perturbed=[again, *perturbed([1], compute)],
            floor=4 * compute,
        )
        if any(run.initial_sha256 != reference.initial_sha256 for run in first.perturbed):
            raise InputError(
                "workload.model",
                "it has other initial weights each time that it is built",
                "return a new model each time; draw its weights by torch, numpy or random",
            )
        if first.hide_errors:
            runs = perturbed(range(2, 2 + PERTURBED_RUNS), 0.0)
            return replace(first, perturbed=[again, *runs], exact_forward=True)
        rest = perturbed(range(2, 1 + PERTURBED_RUNS), compute)
        return replace(first, perturbed=[*first.perturbed, *rest])

    @property
    def plan(self) -> BatchPlan:
        return BatchPlan(global_batch=self.trial.batch_per_step, seed=self.trial.recipe.seed)

    def _roundoffs(self) -> tuple[float, float]:
        """Return the relative errors of a rank's computation and of the reduction over ranks."""
        recipe = self.trial.recipe
        model = self.workload.build_model()
        parameters = [p for p in model.parameters() if p.numel() > 0]
        widest = max((p.numel() // p.shape[0] for p in parameters if p.dim() > 0), default=1)
        terms = self.shares * recipe.gradient_accumulation
        compute = math.sqrt(widest) * UNIT_ROUNDOFF["fp32"]
        # Frozen 16-bit parameters compute in their type, independent of the recipe's precision.
        types = {p.dtype for p in parameters if p.is_floating_point() and p.element_size() < 4}
        compute += max((torch.finfo(dtype).eps / 2 for dtype in types), default=0.0)
        if recipe.precision != "fp32":
            compute += UNIT_ROUNDOFF[recipe.precision]
        if recipe.tf32 and self.trial.device_type == "cuda":
            compute += UNIT_ROUNDOFF["tf32"]
        reduction = math.sqrt(terms) * UNIT_ROUNDOFF[recipe.weights]
        numerics = self.trial.built_strategy.numerics(recipe)
        if numerics.reduction_precision != "fp32":
            reduction += math.sqrt(self.shares) * UNIT_ROUNDOFF[numerics.reduction_precision]
        # Strategies rescale accumulated gradients, so their last digits decide how messages round.
        corrected = recipe.gradient_accumulation > 1 and not self.workload.weights_known
        if corrected and numerics.message_precision != "fp32":
            reduction += UNIT_ROUNDOFF[numerics.message_precision]
        return compute, reduction
