"""The training step: the micro-batches of all strategies, and the worker that most of them use."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmark.base.errors import DataError, InputError, StrategyUnavailable
from shardmark.base.recipe import Optimizer, Recipe
from shardmark.ranks.measure.step.recorder import Spans
from shardmark.ranks.strategies.base import LOSS_SCALE, HeldState, Worker
from shardmark.ranks.strategies.casting import lossless_copy, refuse_unsupported_types
from shardmark.ranks.strategies.optimizers import HIDDEN_MATRIX, Lamb, MuonWithAdamW
from shardmark.ranks.strategies.replicas import DistributedReplicas
from shardmark.ranks.workloads.base import Batch, LossSum, ParameterGroup, Workload
from shardmark.ranks.workloads.model_building import user_function

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

RATE_FACTOR = "rate_factor"
"""Key of an optimizer group for the ratio of its learning rate to the recipe's."""

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
    "lamb": Lamb,
}

WEIGHT_TOLERANCE = 1e-5
"""Relative tolerance of a sum of many weights in fp32."""

AnyTensor = TypeVar("AnyTensor", bound=Tensor)
Synchronise = Callable[[bool], object]
"""Called before each micro-batch; True for the last one of a step, which reduces gradients."""


def share_of_step(loss: LossSum, step_weight: Tensor | float, shares: int) -> Tensor:
    """Return the contribution of a micro-batch to its rank's loss, shape ().

    The mean over the `shares` of all ranks, as libraries take it of gradients, is then the step's
    sum over the step's weight, whatever each share weighs.
    """
    return loss.total * (shares / step_weight)


def check_weight(loss: LossSum, batch: Batch) -> None:
    """Raise `InputError` if the weights of the loss and of the batch differ."""
    weight = float(loss.weight)
    if not math.isclose(weight, batch.weight, rel_tol=WEIGHT_TOLERANCE):
        raise InputError(
            "the workload's loss",
            f"it returned the weight {weight:g} for samples that weigh {batch.weight:g} together",
            "the weight that weights(data) gives for these samples; a task without weights(data)"
            " returns every weight as a tensor, and the ranks add the weights up",
        )


@dataclass(kw_only=True, eq=False)
class StepWorker(Worker):
    """Runs micro-batches through a model, and counts the updates."""

    module: nn.Module = field(kw_only=False)
    """Model whose parameter names are reported."""
    workload: Workload
    recipe: Recipe
    device: torch.device
    shares: int
    """Number of ranks over whose gradients the library takes the mean."""
    wrapped_model: nn.Module | None = None
    """Module of the library that wraps the model; None without a wrapper."""
    synchronise: Synchronise | None = None
    casts_of: str | None = None
    """Strategy whose library casts parameters to the recipe's precision; None under autocast."""
    large: bool = False
    """True if the model is too large for a single rank."""
    accumulates_alone: bool = False
    """True if gradients are not reduced before the last backward pass of a step."""
    sample_ranks: dist.ProcessGroup | None = None
    """Ranks with the distinct shares of a step; None for all ranks."""
    weighs_alone: bool = False
    """True if a weight that only the loss knows is not summed over the ranks."""
    sharded_by: str | None = None
    """Strategy whose library shards the wrapped model; None for replicas."""

    def __post_init__(self) -> None:
        self._model = self.module if self.wrapped_model is None else self.wrapped_model
        if self.recipe.gradient_accumulation == 1:
            self.synchronise = None  # the only one is the last: gradients reduce by themselves
        self._weight_checked = self._reads_checked = False
        self._adds_weights: bool | None = False if self.workload.weights_known else None
        """True if ranks add up the weights that losses return; the first loss decides it."""
        self._weights: list[Tensor] = []
        """Weights of the micro-batches of the current step."""
        self._divisor = self._share_weight = torch.zeros(())
        self._steps_called = 0
        self._steps_taken = 0
        self._counted_call = 0
        self._skipped_on_device: Tensor | float = 0.0

    def step(self, batch: Batch, recorder: Spans) -> Tensor:
        checked = self.checks_every_step or not self._steps_called
        units = self._sharded_units() if checked else {}
        self._reads_checked = checked and self.sharded_by is not None
        with self._blaming_casts(), self._comparing(units) if units else nullcontext():
            loss = self._forward_backward(batch, recorder)
        pending = self._send_loss(loss)
        with recorder.span("optimizer"):
            self._update()
            if self.workload.has_after_step:
                self._call_hook()
        if pending is not None:
            pending.wait()
        return loss

    def _call_hook(self) -> None:
        """Call the task's `after_step`; `StrategyUnavailable` if it needs full weights."""
        try:
            self.workload.after_step(self.module, self._steps_called)
        except RuntimeError as error:
            if "DTensor" not in str(error):
                raise
            raise StrategyUnavailable(
                self.sharded_by or "tensor parallelism",
                "after_step combines sharded parameters with full tensors",
                "keep the average in frozen parameters of the same shapes, such as a deep copy of "
                "the network with requires_grad_(False), or use ddp",
            ) from error

    def _sharded_units(self) -> dict[str, nn.Module]:
        """Modules by name that all ranks must call in the same order."""
        return {}

    def _checking_reads(self) -> AbstractContextManager[object]:
        if not self._reads_checked:
            return nullcontext()
        from shardmark.ranks.strategies.sharded_calls import ReadsOutside

        return ReadsOutside(self.sharded_by or "", self.module)

    def _comparing(self, units: Mapping[str, nn.Module]) -> AbstractContextManager[object]:
        from shardmark.ranks.strategies.sharded_calls import equal_calls

        return equal_calls(
            *(self.sharded_by or "", self.module, units, self.group.gather),
            trained=self._reduced_together(),
        )

    def _reduced_together(self) -> dict[str, nn.Module]:
        """Modules by name that need a gradient on all ranks or on none."""
        return {}

    def _send_loss(self, loss: Tensor) -> dist.Work | None:
        """Start sending the loss to all ranks with the same samples; awaited after the update."""
        return None

    def _forward_backward(self, batch: Batch, recorder: Spans) -> Tensor:
        """Run both passes of each micro-batch; return their contribution to the loss, shape ()."""
        count = self.recipe.gradient_accumulation
        parts: list[Tensor] = []
        for index, micro_batch in enumerate(batch.split(count), start=1):
            last = index == count
            if self.synchronise is not None:
                self.synchronise(last)
            with recorder.span("forward"), self._precision():
                with self._checking_reads():
                    loss = self.workload.loss(self._model, micro_batch)
                parts.append(self._part_of_step(loss, micro_batch, count))
                if last and self.accumulates_alone:
                    parts = self._corrected(parts)
            with recorder.span("backward"):
                self._backward(parts[-1], last)
            parts[-1] = parts[-1].detach()
        self._weight_checked = True
        if not self.accumulates_alone:
            parts = self._corrected(parts)
        return parts[0] if count == 1 else torch.stack(parts).sum()

    def _corrected(self, parts: list[Tensor]) -> list[Tensor]:
        """Divide losses and existing gradients by the weight of the step."""
        factor = self._correction()
        if factor is None:
            return parts
        self._scale_gradients(factor)
        return [part * factor for part in parts]

    def _part_of_step(self, loss: LossSum, batch: Batch, parts: int) -> Tensor:
        """Return what one of `parts` micro-batches adds to its rank's loss, shape ().

        Where only the losses know the weights, the first of several micro-batches stands for all
        of them; `_correction` makes up for it.
        """
        if self._adds_weights is None:
            same = isinstance(loss.weight, int | float) and loss.weight == batch.weight
            differs = float(not (loss.known_before or same))
            self._adds_weights = bool(self._over_shares(torch.tensor(differs, device=self.device)))
        if not self._adds_weights:
            self._check_weight(loss, batch)
            return share_of_step(loss, batch.step_weight, self.shares)
        weight = torch.as_tensor(loss.weight, dtype=torch.float32, device=self.device).clone()
        if not self._weights:
            estimate = self._over_shares(weight * parts)
            if parts == 1:
                self._refuse_nothing(estimate)
            self._divisor = torch.where(estimate == 0, batch.step_weight, estimate)
        self._weights.append(weight)
        return share_of_step(loss, self._divisor, self.shares)

    def _correction(self) -> Tensor | None:
        """Factor from the divisor used so far to the weight of the step, shape ()."""
        weights, self._weights = self._weights, []
        if not weights:
            return None
        self._share_weight = torch.stack(weights).sum()
        if len(weights) == 1:
            return None
        total = self._over_shares(self._share_weight.clone())
        self._refuse_nothing(total)
        return self._divisor / torch.where(total == 0, self._divisor, total)

    def _over_shares(self, value: Tensor) -> Tensor:
        """Sum over the shares of the step, in place.  Collective."""
        if self.weighs_alone:
            value *= self.shares  # as if all weighed as much
        elif self.shares > 1:
            dist.all_reduce(value, group=self.sample_ranks)
        return value

    def _refuse_nothing(self, step_weight: Tensor) -> None:
        """Raise `DataError` for a step of weight 0; a GPU does not check, as that would wait."""
        if step_weight.device.type == "cpu" and not (step_weight or self.weighs_alone):
            reason = "the samples of a step weigh 0 together, as the loss returns it"
            remedy = "leave out samples that weigh nothing, or use a larger batch"
            raise DataError("training set", reason, remedy)

    @abstractmethod
    def _scale_gradients(self, factor: Tensor) -> None:
        """Multiply the existing gradients of the step."""

    def share_weight(self, batch: Batch) -> float:
        return float(self._share_weight) if self._adds_weights else batch.weight

    def settings(self) -> dict[str, object]:
        alone = "each rank divides by the weight that its loss returns"
        weights = alone if self.weighs_alone else "the ranks add up the weights that losses return"
        return {"weights": weights} if self._adds_weights else {}

    def _check_weight(self, loss: LossSum, batch: Batch) -> None:
        """Check every step on the host, and once if the check would wait for the device."""
        on_device = isinstance(loss.weight, Tensor) and loss.weight.device.type != "cpu"
        if not (on_device and self._weight_checked):
            check_weight(loss, batch)

    def _precision(self) -> AbstractContextManager[object]:
        return nullcontext() if self.casts_of else autocast(self.recipe, self.device)

    def _blaming_casts(self) -> AbstractContextManager[object]:
        precision, weights = self.recipe.precision, self.recipe.weights
        if self.casts_of is not None:
            remedy = "set the strategy's mixed_precision to autocast"
            return refuse_unsupported_types(self.casts_of, precision, remedy)
        if weights != "fp32":
            return refuse_unsupported_types(f"weights: {weights}", weights, "set weights: fp32")
        return nullcontext()

    def _backward(self, share: Tensor, last: bool) -> None:
        share.backward()  # type: ignore[no-untyped-call]  # torch's

    @abstractmethod
    def _update(self) -> None:
        """Update the parameters: the gradients of the step are complete."""

    def _count_updates_of(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_post_hook(self._count_step)

    def _count_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        # A fused optimizer is called anyway, and skips by itself what the scaler found.
        self._skipped_on_device = self._skipped_on_device + getattr(optimizer, "found_inf", 0.0)
        if self._counted_call != self._steps_called:  # stage 3 steps once for each sub-group
            self._counted_call = self._steps_called
            self._steps_taken += 1

    def skipped_steps(self) -> int:
        return self._steps_called - self._steps_taken + int(self._skipped_on_device)

    def full_parameters(self) -> dict[str, Tensor]:
        return dict(self.each_parameter())

    def buffers(self) -> dict[str, Tensor]:
        return {n: buffer.detach().cpu().clone() for n, buffer in self.module.named_buffers()}

    def evaluation_model(self) -> AbstractContextManager[nn.Module] | None:
        return self._evaluating() if self.large else None

    @contextmanager
    def _evaluating(self) -> Iterator[nn.Module]:
        modes = {module: module.training for module in self.module.modules()}
        compiles = self.recipe.compile != "none"
        eager = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
        try:
            with eager:
                self.module.eval()  # a user's method may return nothing
                yield self.module
        finally:
            for module, training in modes.items():
                module.training = training
            self._shard_again()

    def _shard_again(self) -> None:
        """Reshard: an evaluation may have left parameters gathered."""


@dataclass(kw_only=True, eq=False)
class EagerWorker(StepWorker):
    """Updates a model, whose gradients the library reduces, by an optimizer of torch."""

    untracked_bytes: Callable[[], int] = lambda: 0
    """Bytes of gradients as in `HeldState.untracked_bytes`."""
    error_feedback: Callable[[], Iterable[Tensor]] = tuple
    """Returns the tensors that the reduction of gradients keeps from step to step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # FSDP2's shards: the module shows whole parameters in their place while they exist.
        self._trained = {n: p for n, p in self._named_parameters() if p.requires_grad}
        self._parameters = list(self._trained.values())
        self._optimizer = self._built_optimizer()
        self._scaler = self._built_scaler()
        self._count_updates_of(self._optimizer)

    def _sharded_units(self) -> dict[str, nn.Module]:
        if self.sharded_by is None:
            return {}
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

        def sharded(module: nn.Module) -> bool:
            return isinstance(module, FSDPModule | FullyShardedDataParallel)

        return {n: m for n, m in self.module.named_modules() if n and sharded(m)}

    def _reduced_together(self) -> dict[str, nn.Module]:
        from torch.distributed.fsdp import FSDPModule

        # Of micro-batches that are reduced together, one that calls a module suffices.
        if not isinstance(self.module, FSDPModule) or self.synchronise is not None:
            return {}
        return {
            name: module
            for name, module in self.module.named_modules()
            if any(p.requires_grad for p in module.parameters(recurse=False))
        }

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters that this rank holds, by their reported names."""
        return self.module.named_parameters()

    def _built_optimizer(self) -> torch.optim.Optimizer:
        return build_optimizer(self._trained, self.recipe, self.workload.parameter_groups)

    def _built_scaler(self) -> torch.amp.GradScaler:
        return loss_scaler(self.recipe, self._parameters[0].device)

    def _clip(self, largest_norm: float) -> None:
        nn.utils.clip_grad_norm_(self._parameters, largest_norm)

    def _scale_gradients(self, factor: Tensor) -> None:
        scale([local_shard(p.grad) for p in self._parameters if p.grad is not None], factor)

    def _backward(self, share: Tensor, last: bool) -> None:
        self._scaler.scale(share).backward()  # type: ignore[no-untyped-call]  # torch's

    def _update(self) -> None:
        self._steps_called += 1
        if self.recipe.gradient_clipping is not None:
            self._scaler.unscale_(self._optimizer)
            self._clip(self.recipe.gradient_clipping)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        switch_weights(self._optimizer, "eval")
        yield
        switch_weights(self._optimizer, "train")

    def _shard_again(self) -> None:
        from torch.distributed.fsdp import FSDPModule

        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def set_learning_rate(self, learning_rate: float) -> None:
        set_learning_rates(self._optimizer.param_groups, learning_rate)

    def each_parameter(self) -> Iterator[tuple[str, Tensor]]:
        if isinstance(self.wrapped_model, DistributedReplicas):
            self.wrapped_model.check_reduced()
        for name, parameter in sorted(self._named_parameters()):
            yield name, lossless_copy(unsharded(parameter))

    def full_gradients(self) -> dict[str, Tensor]:
        scale = self._scaler.get_scale()
        return {
            name: lossless_copy(unsharded(p.grad)) / scale
            for name, p in self._named_parameters()
            if p.grad is not None
        }

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        return {
            name: {
                key: lossless_copy(unsharded(value))
                for key, value in self._optimizer.state.get(parameter, {}).items()
                if isinstance(value, Tensor)
            }
            for name, parameter in self._named_parameters()
        }

    def held_state(self) -> HeldState:
        # FSDP2 shows unsharded parameters while they exist; the optimizer always has the shards.
        grouped = [p for group in self._optimizer.param_groups for p in group["params"]]
        parameters = (*self.module.parameters(), *grouped)
        return HeldState(
            parameters=parameters,
            gradients=(*(p.grad for p in parameters if p.grad is not None), *self.error_feedback()),
            optimizer_state=tuple(state_tensors(self._optimizer)),
            untracked_bytes=self.untracked_bytes(),
        )


def build_optimizer(
    named: Mapping[str, nn.Parameter],
    recipe: Recipe,
    groups: Sequence[ParameterGroup] = (),
    made: Callable[[list[dict[str, Any]], Optimizer], torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """Build the recipe's optimizer with every option set; by default all parameters are one group.

    Raises `InputError` for a group with an option that the optimizer does not have.
    """
    chosen = groups or [ParameterGroup(names=frozenset(named), options={})]
    parts = [([p for name, p in named.items() if name in g.names], g.options) for g in chosen]
    filled = [{"params": group, **options} for part, options in parts for group in by_mesh(part)]
    if recipe.optimizer.name == "muon":
        filled = by_hidden_matrices(filled, recipe.optimizer)
    optimizer = (made or create_optimizer)(filled, recipe.optimizer)
    unknown = {key for group in groups for key in group.options} - optimizer.defaults.keys()
    if unknown:
        reason = f"{type(optimizer).__name__} has no {' and no '.join(sorted(unknown))}"
        raise InputError("parameter_groups", reason, "leave it out, or take another optimizer")
    for group in optimizer.param_groups:
        group[RATE_FACTOR] = group["lr"] / recipe.optimizer.lr
    return optimizer


def scale(tensors: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place; all are on one device."""
    if tensors := [*tensors]:
        torch._foreach_mul_(tensors, factor.to(tensors[0].device))


def by_mesh(tensors: Iterable[AnyTensor]) -> list[list[AnyTensor]]:
    """Group tensors by device mesh: torch's multi-tensor operators take only one mesh at once."""
    by_device_mesh: dict[object, list[AnyTensor]] = {}
    for tensor in tensors:
        by_device_mesh.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return [*by_device_mesh.values()]


def by_hidden_matrices(groups: Iterable[dict[str, Any]], spec: Optimizer) -> list[dict[str, Any]]:
    """Divide groups into those of Muon and those of its AdamW, with its learning rate."""
    return [
        ({} if hidden or spec.adamw_lr is None else {"lr": spec.adamw_lr})
        | group
        | {HIDDEN_MATRIX: hidden, "params": parameters}
        for group in groups
        for hidden in (True, False)
        if (parameters := [p for p in group["params"] if hasattr(p, HIDDEN_MATRIX) == hidden])
    ]


def set_learning_rates(groups: Iterable[dict[str, Any]], learning_rate: float) -> None:
    """Set the groups' learning rates, scaled by the groups' own factors."""
    for group in groups:
        group["lr"] = learning_rate * group.get(RATE_FACTOR, 1.0)


def switch_weights(optimizer: torch.optim.Optimizer, to: Literal["train", "eval"]) -> None:
    """Switch a schedule-free optimizer's parameters; its `step` refuses those of evaluation."""
    if callable(switch := getattr(optimizer, to, None)):
        switch()


def refuse_switched_weights(strategy: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise `StrategyUnavailable` for an optimizer that evaluates other weights than it trains."""
    if callable(getattr(optimizer, "eval", None)):
        raise StrategyUnavailable(
            strategy,
            f"{type(optimizer).__name__} evaluates other weights than it trains, by its eval(), "
            "and here it has a part of the weights",
            "use ddp, fsdp or single",
        )


def create_optimizer(
    parameters: Iterable[nn.Parameter] | list[dict[str, Any]], spec: Optimizer
) -> torch.optim.Optimizer:
    """Create the optimizer.  Raises `InputError` for a user's class that cannot be created."""
    if spec.path is not None:
        made = user_function(spec.path, "recipe.optimizer.path")
        try:
            optimizer = made(parameters, lr=spec.lr, **spec.options)
        except TypeError as error:
            reason = f"{spec.path} cannot be made: {error}"
            raise InputError("recipe.optimizer.options", reason, "its keyword arguments") from error
        except ValueError as error:
            reason = f"{spec.path} cannot be made: {error}"
            remedy = "an optimizer that takes the model's parameters and these options"
            raise InputError("recipe.optimizer.path", reason, remedy) from error
        if not isinstance(optimizer, torch.optim.Optimizer):
            reason = f"{spec.path} made a {type(optimizer).__name__}"
            raise InputError("recipe.optimizer.path", reason, "a torch.optim.Optimizer")
        switch_weights(optimizer, "train")
        return optimizer
    not_torch = {"name", "implementation", "state_bits", "adamw_lr"}
    settings = spec.model_dump(exclude=not_torch)  # options of its kind, as torch's
    chosen = {} if spec.implementation == "default" else {spec.implementation: True}
    if spec.name == "muon":
        adamw = {key: settings.pop(key) for key in ("betas", "eps")} | chosen
        of_both = {key: settings.pop(key) for key in ("lr", "weight_decay")}
        return MuonWithAdamW(parameters, **of_both, muon=settings, adamw=adamw)
    built: torch.optim.Optimizer = KINDS[spec.name](parameters, **settings, **chosen)
    return built


def autocast(recipe: Recipe, device: torch.device) -> AbstractContextManager[object]:
    """Context of computation in the recipe's precision with fp32 parameters."""
    if recipe.precision == recipe.weights:
        return nullcontext()
    return torch.autocast(device.type, dtype=AUTOCAST_DTYPES[recipe.precision])


def loss_scaler(
    recipe: Recipe, device: torch.device, kind: type[torch.amp.GradScaler] = torch.amp.GradScaler
) -> torch.amp.GradScaler:
    """Return a scaler of losses by `LOSS_SCALE` in fp16 that skips steps which are not finite.

    `device` is that of the gradients, which offloading takes to the host: from a GPU the scale
    would be copied there without waiting, and read too early.
    """
    scaler = kind(
        device.type,
        init_scale=LOSS_SCALE["initial"],
        growth_factor=LOSS_SCALE["growth_factor"],
        backoff_factor=LOSS_SCALE["backoff_factor"],
        growth_interval=int(LOSS_SCALE["growth_interval"]),
        enabled=recipe.precision == "fp16",
    )
    scaler.scale(torch.zeros((), device=device))  # the first loss decides where it is kept
    return scaler


def state_keys(spec: Optimizer) -> tuple[str, ...]:
    """Keys of the optimizer's state whose tensors have the parameter's shape."""
    tried = nn.Parameter(torch.ones(2, 3))
    tried.grad = torch.ones(2, 3)
    optimizer = create_optimizer([tried], spec)
    optimizer.step()
    state = optimizer.state[tried].items()
    return tuple(k for k, v in state if isinstance(v, Tensor) and v.shape == tried.shape)


def unsharded(tensor: Tensor) -> Tensor:
    """Return an unsharded copy of a parameter.  Collective for a shard."""
    from torch.distributed.tensor import DTensor

    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached.clone()


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, sharing its memory and without a gradient."""
    from torch.distributed.tensor import DTensor

    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in tensors if isinstance(value, Tensor)]
