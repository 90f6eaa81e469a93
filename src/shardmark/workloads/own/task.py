"""The user's class as a workload: its methods are called in the right place, and checked."""

from __future__ import annotations

import inspect
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from shardmark.core.errors import InputError, error_kind
from shardmark.core.metrics import METRICS, Better
from shardmark.workloads.base import (
    BatchPlan,
    CannotShard,
    LossSum,
    ParameterGroup,
    SequencePlan,
    TensorPlan,
)
from shardmark.workloads.exchanging import exchanging, problem_between
from shardmark.workloads.model_building import (
    check_fresh,
    generators_kept,
    seed_generators,
    user_function,
)
from shardmark.workloads.order import Share, checked_weights, seed_of
from shardmark.workloads.own.options import NEEDED
from shardmark.workloads.sampled_task import SampledBatch, SampledTask, added

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardmark.core.shares import Shard
    from shardmark.workloads.base import Batch
    from shardmark.workloads.own.options import OwnOptions

DEFAULT_METRIC = "validation_loss"

TAKEN_OVER = {
    "backward": "strategies run the backward pass, and communicate in it",
    "training_step": "loss(model, batch) takes its place, and the strategy takes the step",
    "configure_optimizers": "recipe.optimizer is the one optimizer; several cannot be shared out",
    "optimizers": "recipe.optimizer is the one optimizer; several cannot be shared out",
    "optimizer_step": "the strategy takes the step",
}
"""Methods that a strategy could not follow -> why."""
GROUP_OPTIONS = ("lr", "weight_decay", "betas", "eps")
"""Others change what state an optimizer keeps of a parameter, which all share."""

_ARRAY = (Tensor, np.ndarray)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnBatch(SampledBatch):
    """Collated samples of one step."""

    content: Any
    """What `collate` made: tensors, or nested mappings, lists and tuples of them."""


class Selection:
    """A map-style data set, or some samples of it, numbered anew from 0."""

    def __init__(self, data: Any, ids: NDArray[np.int64] | None = None) -> None:
        self._data = data
        self._ids = np.arange(len(data)) if ids is None else ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> Any:
        return self._data[int(self._ids[index])]

    def select(self, ids: NDArray[np.int64]) -> Selection:
        return Selection(self._data, self._ids[ids])

    def told(self, task: Any, method: str) -> NDArray[np.float64] | None:
        """A number of each sample, where the task's method tells them of a data set."""
        tell = getattr(task, method, None)
        if tell is None:
            return None
        return checked_weights(tell(self._data), len(self._data), method)[self._ids]


class OwnTask(SampledTask[Selection, OwnBatch]):
    """A class with `model`, `train_data`, `validation_data` and `loss`, and more where wanted."""

    def __init__(self, options: OwnOptions, seed: int) -> None:
        self._options = options
        self._evaluation_batch = options.evaluation_batch
        with generators_kept():
            seed_generators(seed)
            self._task = task = _made(options)
            super().__init__(
                options,
                seed,
                self._selection("train_data"),
                self._selection("validation_data"),
                synthetic=bool(getattr(task, "synthetic", False)),
            )
        self._better = self._declared_better()
        self._training_weights = self._training.told(task, "weights")
        self._validation_weights = self._validation.told(task, "weights")
        self._tokens = self._training.told(task, "tokens")
        self._model_calls = int(getattr(task, "model_calls", 1))
        self._collate = getattr(task, "collate", _collated)
        self._groups: tuple[ParameterGroup, ...] = ()
        self._loss_checked = False

    @property
    def weights_known(self) -> bool:
        return self._training_weights is not None

    @property
    def not_additive_declared(self) -> bool:
        return not getattr(self._task, "loss_adds_up", True)

    @property
    def not_additive(self) -> str | None:
        if self.not_additive_declared:
            return "the task declares that its loss does not add up"
        if self._collate_draws():
            return "collate draws random numbers, and others for each share of a batch"
        return None

    def _collate_draws(self) -> bool:
        """Whether the generators' next numbers are others after a batch was collated."""
        with generators_kept():
            samples = [self._training[index] for index in range(min(2, self.training_samples))]
            drawn = []
            for collate in (list, self._collate):
                seed_generators(0)
                collate(samples)
                drawn.append((float(torch.rand(())), random.random(), np.random.random()))
        return drawn[0] != drawn[1]

    def _selection(self, method: str) -> Selection:
        data = getattr(self._task, method)()
        kind = type(data).__name__
        if isinstance(data, DataLoader):
            found = f"{method}() gives a DataLoader"
            raise self._refusal(found, "give its data set, its argument dataset")
        if isinstance(data, Mapping) and 0 not in data:
            found = f"{method}() gives a {kind} with the keys {', '.join(map(str, data))}"
            raise self._refusal(found, "a list of samples, or a map-style Dataset")
        arrays = isinstance(data, tuple) and all(isinstance(part, _ARRAY) for part in data)
        if arrays and len(data) < min((len(part) for part in data if part.ndim), default=0):
            found = f"{method}() gives a tuple of {len(data)} arrays, which counts as samples"
            raise self._refusal(found, "torch.utils.data.TensorDataset(X, y)")
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise self._refusal(
                f"{method}() gives a {kind} without length or index",
                "a sequence, or a map-style Dataset: every rank has to find its own samples",
            )
        return Selection(data)

    def _refusal(self, found: str, allowed: str) -> InputError:
        return InputError("workload.task", f"{self._options.task}: {found}", allowed)

    def tokens_in(self, sample_ids: Iterable[Sequence[int]]) -> int | None:
        if self._tokens is None:
            return None
        return sum(int(self._tokens[np.asarray(ids, np.int64)].sum()) for ids in sample_ids)

    @property
    def better(self) -> Mapping[str, Better]:
        return self._better

    def _declared_better(self) -> dict[str, Better]:
        declared = getattr(self._task, "better", {})
        if not isinstance(declared, Mapping) or any(
            way not in ("lower", "higher") for way in map(str, declared.values())
        ):
            raise self._refusal(f"better is {declared!r}", "{metric: lower or higher}")
        return {str(name): way for name, way in declared.items()}

    def build_model(self) -> nn.Module:
        with generators_kept():
            seed_generators(self._seed)
            model = self._task.model()
        if not isinstance(model, nn.Module):
            raise self._refusal(f"model() made a {type(model).__name__}", "an nn.Module")
        check_fresh(f"{self._options.task}: model()", model)
        own = getattr(self._task, "parameter_groups", None)
        self._groups = self._named_groups(model, own(model)) if own else ()
        model.train()  # a user's method may return nothing
        return model

    @property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        return self._groups

    def _named_groups(self, model: nn.Module, groups: Iterable[Any]) -> tuple[ParameterGroup, ...]:
        """By name, since a strategy may hold the parameters in other tensors."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        made = []
        for group in groups:
            parameters = group.get("params") if isinstance(group, Mapping) else None
            if not isinstance(parameters, Iterable):
                raise self._refusal("parameter_groups gives no dictionary with params", "[{...}]")
            options = {key: value for key, value in group.items() if key != "params"}
            chosen = frozenset(names.get(parameter, "") for parameter in parameters)
            if "" in chosen:
                found = "parameter_groups has a tensor that is no parameter of the model"
                raise self._refusal(found, "those of the model that it is given")
            if unknown := options.keys() - set(GROUP_OPTIONS):
                found = f"parameter_groups sets {' and '.join(sorted(unknown))}"
                raise self._refusal(found, f"{', '.join(GROUP_OPTIONS)} in place of the recipe's")
            numbers = {key: self._numbers(key, value) for key, value in options.items()}
            made.append(ParameterGroup(names=chosen, options=numbers))
        times = Counter(name for group in made for name in group.names)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and times[name] != 1:
                found = f"parameter_groups has {name} {times[name]} times"
                raise self._refusal(found, "every trained parameter once")
        return tuple(made)

    def _numbers(self, key: str, value: Any) -> float | tuple[float, ...]:
        """Plain ones: an option may be a tensor or a number of NumPy's."""
        try:
            many = tuple(map(float, value)) if key == "betas" else (float(value),)
        except (TypeError, ValueError):
            many = ()
        if len(many) != 1 + (key == "betas") or not all(0 <= n < math.inf for n in many):
            found = f"parameter_groups sets {key} to {value!r}"
            raise self._refusal(found, "two numbers of at least 0" if key == "betas" else ">= 0")
        return many if key == "betas" else many[0]

    def blocks(self, model: nn.Module) -> Sequence[nn.Module] | None:
        own = getattr(self._task, "blocks", None)
        return None if own is None else list(own(model))

    def tensor_plan(self, model: nn.Module) -> TensorPlan | CannotShard:
        own = getattr(self._task, "tensor_plan", None)
        if own is None:
            return super().tensor_plan(model)
        return TensorPlan(
            styles=self._planned("tensor_plan", own(model), "column, row, gathered or summed"),
            units=dict(getattr(self._task, "tensor_units", {})),
        )

    def _planned(self, method: str, layers: object, allowed: str) -> dict[str, str]:
        if not isinstance(layers, Mapping):
            found = f"{method} gives a {type(layers).__name__}"
            raise self._refusal(found, f"a dictionary: {{module: {allowed}}}")
        return dict(layers)

    def sequence_plan(self, model: nn.Module) -> SequencePlan | CannotShard:
        own = getattr(self._task, "sequence_plan", None)
        if own is None:
            return super().sequence_plan(model)
        layers = self._planned("sequence_plan", own(model), "after or before")
        if (problem := problem_between(model, layers)) is not None:
            return problem
        cut = getattr(self._task, "sequence_part", None)
        if cut is None:
            return CannotShard("it has no sequence_part(batch, index, count)", "add it to the task")

        def part(batch: OwnBatch, index: int, count: int) -> OwnBatch:
            return replace(batch, content=cut(batch.content, index, count))

        return SequencePlan(
            attend=partial(exchanging, model, layers),
            part=part,
            units=dict(getattr(self._task, "sequence_units", {})),
        )

    def pipeline_parts(self, model: nn.Module) -> Sequence[nn.Module] | CannotShard:
        own = getattr(self._task, "pipeline_parts", None)
        return super().pipeline_parts(model) if own is None else list(own(model))

    def _training_batch(self, plan: BatchPlan, share: Share) -> OwnBatch:
        positions = range(share.positions.start, share.positions.stop)
        seeds = [seed_of(plan.seed, "own", share.epoch, position) for position in positions]
        return OwnBatch(
            content=self._content(self._training, share.ids, seeds),
            sample_ids=tuple(share.ids.tolist()),
            step_weight=share.step_weight,
            sample_weights=share.weights,
        )

    def _validation_batch(self, ids: NDArray[np.int64]) -> OwnBatch:
        seeds = [seed_of(self._seed, "own", index) for index in ids.tolist()]
        weights = self._validation_weights
        return OwnBatch(
            content=self._content(self._validation, ids, seeds),
            sample_ids=tuple(ids.tolist()),
            step_weight=1.0,  # nothing is trained
            sample_weights=None if weights is None else tuple(weights[ids].tolist()),
        )

    def _content(self, data: Selection, ids: NDArray[np.int64], seeds: Sequence[int]) -> Any:
        """What a sample draws depends on its seed, and not on who reads it."""
        samples = []
        with generators_kept():
            for index, seed in zip(ids.tolist(), seeds, strict=True):
                seed_generators(seed)
                samples.append(data[index])
            return self._collate(samples)

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """What the task returns, a scalar mean times its samples' weight; in fp32."""
        content = cast("OwnBatch", batch).content
        calls = 0

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        training = torch.is_grad_enabled() and model.training
        first = training and not self._loss_checked
        parameters = tuple(model.parameters()) if first else ()
        names = [n.removeprefix("module.") for n, _ in model.named_parameters()] if first else []
        before = _marks(parameters)
        counting = model.register_forward_pre_hook(count)
        try:
            returned = self._task.loss(model, content)
        finally:
            counting.remove()
        marks = zip(parameters, names, before, _marks(parameters), strict=True)
        changed = [(parameter, name) for parameter, name, was, now in marks if was != now]
        if changed and not any(parameter.requires_grad for parameter, _ in changed):
            raise self._refusal(
                f"loss changes {changed[0][1]}, a frozen parameter of the model (a teacher, or a"
                " moving average), which strategies may hold in parts or rounded",
                "make it buffers, which forward may change in training mode: see 'Teachers' in the"
                " guide 'Train your own task'",
            )
        if changed:
            raise self._refusal(
                f"loss changes {changed[0][1]}, a parameter of the model, or its gradient (a"
                " backward pass, an optimizer, max_norm of an embedding): it cannot be shared out",
                "compute the loss and return it: the strategy takes the step with recipe.optimizer",
            )
        if calls != self._model_calls:
            raise self._refusal(
                f"loss calls the model {calls} times, and declares {self._model_calls}",
                f"model_calls = {calls} in the class"
                if calls
                else "call it as model(...): strategies see no other way",
            )
        loss = self._sum_of(returned, batch.weight)
        total = loss.total
        if training and not total.requires_grad:
            raise self._refusal(
                "loss returns a tensor without a gradient",
                "the loss as computed from the model's outputs; strategies run the backward pass",
            )
        if first:
            self._refuse_untrained(total, {*model.parameters()})
            self._loss_checked = True
        return loss

    def _refuse_untrained(self, total: Tensor, of_model: set[nn.Parameter]) -> None:
        """Raise `InputError` where the loss would train a part of the task, not of the model."""
        task = self._task
        attributes = {**vars(type(task)), **getattr(task, "__dict__", {})}
        if isinstance(task, nn.Module):
            attributes |= {**task._modules, **task._parameters}
        learning = _leaves(total) - of_model
        for name, value in attributes.items():
            held = value.parameters() if isinstance(value, nn.Module) else (value,)
            if any(isinstance(part, nn.Parameter) and part in learning for part in held):
                raise self._refusal(
                    f"the loss depends on {name}, which is no part of the model: nothing trains it",
                    f"make it a part of model(); or freeze it, as a teacher: "
                    f"self.{name}.requires_grad_(False)",
                )

    def _sum_of(self, returned: object, weight: float) -> LossSum:
        if isinstance(returned, Tensor) and returned.numel() == 1:
            if weight == 0 and not returned.isfinite():  # asks the device in this case alone
                found = f"a micro-batch weighs nothing, and its mean is {returned.item()}"
                raise self._refusal(found, "return (sum, weight)")
            return LossSum(total=returned.reshape(()).float() * weight, weight=weight)
        if isinstance(returned, tuple) and len(returned) == 2:
            total, own = returned
            if isinstance(total, Tensor) and total.numel() == 1:
                single = isinstance(own, int | float | np.number)
                if isinstance(own, Tensor) and own.numel() == 1:
                    own, single = own.detach().reshape(()), True
                if not single:
                    found = f"loss returned two values, and the second, {_described(own)},"
                    allowed = "(sum, weight), both scalars; or the mean alone, without outputs"
                    raise self._refusal(f"{found} is no weight", allowed)
                total = total.reshape(()).float()
                return LossSum(total=total, weight=own, known_before=self.weights_known)
        raise self._refusal(
            f"loss returned {_described(returned)}",
            "(sum, weight), both scalars; or the mean as a scalar tensor",
        )

    @torch.no_grad()
    def evaluate(self, model: nn.Module, shard: Shard, device: torch.device) -> dict[str, Tensor]:
        """The task's sums over the shard's validation batches, on the CPU, in fp64."""
        sums: dict[str, Tensor] = {}
        for batch in self._validated(self._validation_batch, shard):
            more = self._sums(model, batch.to(device))
            doubles = {
                name: torch.as_tensor(value).detach().to(torch.float64)
                for name, value in more.items()
            }
            sums = added([sums, doubles])
        return {name: value.cpu() for name, value in sums.items()}

    def _sums(self, model: nn.Module, batch: OwnBatch) -> Mapping[str, Any]:
        evaluate = getattr(self._task, "evaluate", None)
        if evaluate is None:
            loss = self.loss(model, batch)
            return {"loss": loss.total, "weight": loss.weight}
        sums = evaluate(model, batch.content)
        if not isinstance(sums, Mapping):
            found = f"evaluate returned a {type(sums).__name__}"
            raise self._refusal(found, "a dictionary of sums")
        return sums

    def quality(self, parts: Iterable[object]) -> Mapping[str, float | None]:
        """The task's metrics, from the sums over all validation samples."""
        sums = {name: v.item() if v.numel() == 1 else v for name, v in added(parts).items()}
        if not sums:
            return {}
        metrics = getattr(self._task, "metrics", None)
        if metrics is None:
            if sums["weight"] == 0:
                raise self._refusal("the validation samples weigh 0 together", "more of them")
            return {DEFAULT_METRIC: float(sums["loss"] / sums["weight"])}
        named = metrics(sums)
        if not isinstance(named, Mapping):
            found = f"metrics returned a {type(named).__name__}"
            raise self._refusal(found, "a dictionary of numbers")
        for name in named:
            if not (isinstance(name, str) and name.isidentifier()) or (
                name in METRICS and METRICS[name].group != "quality"
            ):
                raise self._refusal(
                    f"metrics names {name!r}", "letters, digits and _; no metric of speed"
                )
        return {name: float(value) for name, value in named.items()}


def _made(options: OwnOptions) -> Any:
    """The user's object; `InputError` where the class cannot be made, or cannot be shared out."""
    create = user_function(options.task, "workload.task")
    try:
        task = create(**options.options)
    except TypeError as error:
        listed = ", ".join(f"{key}={value!r}" for key, value in options.options.items())
        raise InputError(
            "workload.options",
            f"{options.task} cannot be made with {listed or 'no arguments'}: {error}",
            f"its arguments are {inspect.signature(create)}",
        ) from error
    missing = [name for name in NEEDED if not callable(getattr(task, name, None))]
    if missing:
        raise InputError(
            "workload.task",
            f"{options.task} has no method {', '.join(missing)}",
            f"needed are {', '.join(NEEDED)}",
        )
    for name, reason in TAKEN_OVER.items():
        if callable(getattr(task, name, None)):
            raise InputError("workload.task", f"{options.task} has a method {name}", reason)
    if callable(getattr(task, "evaluate", None)) and not hasattr(task, "metrics"):
        raise InputError(
            "workload.task",
            f"{options.task} has evaluate(), which gives sums, and no metrics(sums)",
            "metrics(sums) -> dictionary of numbers",
        )
    return task


def _collated(samples: list[Any]) -> Any:
    """torch's default; `InputError` in place of its words where it cannot join the samples."""
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        if error_kind(error) == "out_of_memory":
            raise
        first, *others = map(_shapes, samples)
        found = f"torch's default collate cannot join the samples: {error}"
        for at, other in enumerate(others, start=1):
            if differing := [pair for pair in zip(first, other, strict=False) if len({*pair}) > 1]:
                one, two = differing[0]
                found = f"samples 0 and {at} of a batch differ in shape ({one} and {two})"
                break
        allowed = "write collate(samples), which pads, packs or converts them"
        raise InputError("workload.task", found, allowed) from error


def _shapes(sample: Any) -> list[object]:
    """The shape of every array in the sample, in order; of other values the type."""
    if isinstance(sample, Mapping):
        sample = list(sample.values())
    if isinstance(sample, list | tuple):
        return [shape for part in sample for shape in _shapes(part)]
    return [tuple(sample.shape) if isinstance(sample, _ARRAY) else type(sample)]


def _described(value: object) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, _ARRAY) else ""
    return f"a {type(value).__name__}{shape}"


def _marks(parameters: Iterable[nn.Parameter]) -> list[tuple[bool, int]]:
    """Others once a backward pass or an optimizer has been there."""
    return [(parameter.grad is None, parameter._version) for parameter in parameters]


def _leaves(total: Tensor) -> set[Tensor]:
    """The tensors that its backward pass gives gradients to."""
    seen: set[Any] = {total.grad_fn} - {None}  # none where it is a parameter itself
    waiting = [*seen]
    while waiting:
        following = {node for node, _ in waiting.pop().next_functions} - {None} - seen
        seen |= following
        waiting.extend(following)
    return {node.variable for node in seen if hasattr(node, "variable")}


build = OwnTask
