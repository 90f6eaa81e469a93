"""Adapts the user's task class to `Workload`, and checks what its methods return."""

from __future__ import annotations

import inspect
import math
import random
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, default_collate

from shardmark.base.errors import InputError, error_kind
from shardmark.base.metrics import METRICS, Better
from shardmark.ranks.workloads.base import (
    NOT_DIVIDED,
    BatchPlan,
    CannotShard,
    LossSum,
    ParameterGroup,
    SequencePlan,
    TensorPlan,
)
from shardmark.ranks.workloads.exchanging import exchanging, problem_between
from shardmark.ranks.workloads.model_building import (
    check_fresh,
    preserved_generators,
    seed_generators,
    user_function,
)
from shardmark.ranks.workloads.order import Share, checked_weights, seed_of
from shardmark.ranks.workloads.own.options import REQUIRED_METHODS
from shardmark.ranks.workloads.sampled_task import SampledBatch, SampledTask, added, gpu_in_use

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardmark.base.layout import Shard
    from shardmark.ranks.workloads.base import Batch
    from shardmark.ranks.workloads.own.options import OwnOptions

DEFAULT_METRIC = "validation_loss"

UNSUPPORTED_METHODS = {
    "backward": "the strategy runs the backward pass, and communicates during it",
    "training_step": "write loss(model, batch) instead: the strategy takes the step",
    "configure_optimizers": "use recipe.optimizer: strategies support exactly one optimizer",
    "optimizers": "use recipe.optimizer: strategies support exactly one optimizer",
    "optimizer_step": "the strategy takes the optimizer step",
}
"""Methods that a task must not have -> reason or replacement."""
GROUP_OPTIONS = ("lr", "weight_decay", "betas", "eps")
"""Options that may differ between groups; others would change the optimizer's state."""

MAX_OBJECTS = 100_000
"""Objects of a task that are looked at for parameters."""

_ARRAY = (Tensor, np.ndarray)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnBatch(SampledBatch):
    """Collated samples of one step."""

    content: Any
    """Result of `collate`: tensors, or nested mappings, lists and tuples of tensors."""
    step: int | None = None
    """Step from 0 that trains on the batch; None for validation."""


class Selection:
    """A map-style data set, or a subset of it, numbered from 0."""

    def __init__(self, data: Any, ids: NDArray[np.int64] | None = None) -> None:
        self._data = data
        self._ids = np.arange(len(data)) if ids is None else ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> Any:
        return self._data[int(self._ids[index])]

    def select(self, ids: NDArray[np.int64]) -> Selection:
        return Selection(self._data, self._ids[ids])

    def sample_values(self, task: Any, method: str) -> NDArray[np.float64] | None:
        """Call a method of the task that returns one number per sample; None without the method."""
        function = getattr(task, method, None)
        if function is None:
            return None
        return checked_weights(function(self._data), len(self._data), method)[self._ids]


class OwnTask(SampledTask[Selection, OwnBatch]):
    """A task of the user: a class with `model`, `train_data`, `validation_data` and `loss`."""

    def __init__(self, options: OwnOptions, seed: int) -> None:
        self._options = options
        self._evaluation_batch = options.evaluation_batch
        with preserved_generators():
            seed_generators(seed)
            self._task = task = _create_task(options)
            super().__init__(
                options,
                seed,
                self._selection("train_data"),
                self._selection("validation_data"),
                synthetic=bool(getattr(task, "synthetic", False)),
            )
        self.better = self._declared_better()
        self._training_weights = self._training.sample_values(task, "weights")
        self._validation_weights = self._validation.sample_values(task, "weights")
        self._tokens = self._training.sample_values(task, "tokens")
        self._model_calls = int(getattr(task, "model_calls", 1))
        self._collate = getattr(task, "collate", _default_collate)
        self.weights_known = self._training_weights is not None
        self.not_additive_declared = not getattr(task, "loss_adds_up", True)
        self.equal_blocks = bool(getattr(task, "equal_blocks", False))
        self.has_after_step = callable(getattr(task, "after_step", None))
        self._loss_checked = self._hook_checked = False
        self._takes_step = "step" in inspect.signature(task.loss).parameters
        self._step = 0
        """Latest step from 0 that was trained, for a loss that depends on it."""
        self._model_type: type = nn.Module
        self._earlier_leaves: list[weakref.ref[Tensor]] | None = None
        """Leaves of the first loss outside of the model: one that returns is stored by the task."""

    @property
    def not_additive(self) -> str | None:
        if self.not_additive_declared:
            return "the task declares that its loss is not additive (loss_adds_up = False)"
        if self._collate_draws():
            return "collate draws random numbers, which depend on how a batch is sharded"
        return None

    def _collate_draws(self) -> bool:
        """True if collating a batch changes the state of a random generator."""
        with preserved_generators():
            samples = [self._training[index] for index in range(min(2, self.training_samples))]
            drawn = []
            for collate in (list, self._collate):
                seed_generators(0)
                collate(samples)
                drawn.append((float(torch.rand(())), random.random(), np.random.random()))
        return drawn[0] != drawn[1]

    def _selection(self, method: str) -> Selection:
        data = getattr(self._task, method)()
        name = type(data).__name__
        if isinstance(data, DataLoader):
            raise self._error(f"{method}() returns a DataLoader", "return its data set instead")
        if isinstance(data, Mapping) and 0 not in data:
            keys = ", ".join(map(str, data))
            problem = f"{method}() returns a {name} with the keys {keys}"
            raise self._error(problem, "return a list of samples, or a map-style Dataset")
        arrays = isinstance(data, tuple) and all(isinstance(array, _ARRAY) for array in data)
        if arrays and len(data) < min((len(array) for array in data if array.ndim), default=0):
            problem = f"{method}() returns a tuple, whose {len(data)} arrays would be the samples"
            raise self._error(problem, "return torch.utils.data.TensorDataset(X, y)")
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise self._error(
                f"{method}() returns a {name} without length or index",
                "return a sequence or a map-style Dataset: ranks read samples by their index",
            )
        return Selection(data)

    def _error(self, problem: str, remedy: str) -> InputError:
        return InputError("workload.task", f"{self._options.task}: {problem}", remedy)

    def tokens_in(self, sample_ids: Iterable[Sequence[int]]) -> int | None:
        if self._tokens is None:
            return None
        return sum(int(self._tokens[np.asarray(ids, np.int64)].sum()) for ids in sample_ids)

    def _declared_better(self) -> dict[str, Better]:
        declared = getattr(self._task, "better", {})
        if not isinstance(declared, Mapping) or any(
            direction not in ("lower", "higher") for direction in map(str, declared.values())
        ):
            raise self._error(f"better is {declared!r}", "use {metric: 'lower' or 'higher'}")
        return {str(name): direction for name, direction in declared.items()}

    def build_model(self) -> nn.Module:
        with preserved_generators():
            seed_generators(self._seed)
            model = self._task.model()
        if not isinstance(model, nn.Module):
            raise self._error(f"model() returns a {type(model).__name__}", "return an nn.Module")
        check_fresh(f"{self._options.task}: model()", model)
        if self._options.adapter is not None:
            from shardmark.ranks.workloads.adapters import add_adapter

            add_adapter(model, self._options.adapter, self.blocks(model), seed=self._seed)
        groups = getattr(self._task, "parameter_groups", None)
        self.parameter_groups = self._named_groups(model, groups(model)) if groups else ()
        self._model_type = type(model)
        model.train()  # a user's method may return nothing
        return model

    def _named_groups(self, model: nn.Module, groups: Iterable[Any]) -> tuple[ParameterGroup, ...]:
        """Name the parameters of each group: a strategy may hold them in other tensors."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        named: list[ParameterGroup] = []
        for group in groups:
            parameters = group.get("params") if isinstance(group, Mapping) else None
            if not isinstance(parameters, Iterable):
                problem = "parameter_groups(model) returns a group without params"
                raise self._error(problem, "return a list of dictionaries with params")
            options = {key: value for key, value in group.items() if key != "params"}
            chosen = frozenset(names.get(parameter, "") for parameter in parameters)
            if "" in chosen:
                problem = (
                    "parameter_groups(model) has a tensor that is not a parameter of the model"
                )
                raise self._error(problem, "use the parameters of the model argument")
            if unknown := options.keys() - set(GROUP_OPTIONS):
                problem = f"parameter_groups(model) sets {' and '.join(sorted(unknown))}"
                raise self._error(problem, f"groups may set {', '.join(GROUP_OPTIONS)}")
            numbers = {key: self._numbers(key, value) for key, value in options.items()}
            named.append(ParameterGroup(names=chosen, options=numbers))
        counts = Counter(name for group in named for name in group.names)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and counts[name] != 1:
                problem = f"parameter_groups(model) has {name} {counts[name]} times"
                raise self._error(problem, "put every trained parameter into exactly one group")
        return tuple(named)

    def _numbers(self, key: str, value: Any) -> float | tuple[float, ...]:
        """Convert an option, which may be a tensor or a NumPy number, to plain numbers."""
        try:
            numbers = tuple(map(float, value)) if key == "betas" else (float(value),)
        except (TypeError, ValueError):
            numbers = ()
        if len(numbers) != 1 + (key == "betas") or not all(0 <= n < math.inf for n in numbers):
            allowed = "two numbers of at least 0" if key == "betas" else "a number of at least 0"
            raise self._error(f"parameter_groups(model) sets {key} to {value!r}", f"use {allowed}")
        return numbers if key == "betas" else numbers[0]

    def blocks(self, model: nn.Module) -> Sequence[nn.Module] | None:
        blocks = getattr(self._task, "blocks", None)
        return None if blocks is None else list(blocks(model))

    def tensor_plan(self, model: nn.Module) -> TensorPlan | CannotShard:
        if self._options.adapter is not None:
            return NOT_DIVIDED
        plan = getattr(self._task, "tensor_plan", None)
        if plan is None:
            return super().tensor_plan(model)
        return TensorPlan(
            styles=self._layers("tensor_plan", plan(model), "column, row, gathered or summed"),
            units=dict(getattr(self._task, "tensor_units", {})),
        )

    def _layers(self, method: str, layers: object, allowed: str) -> dict[str, str]:
        if not isinstance(layers, Mapping):
            problem = f"{method}(model) returns a {type(layers).__name__}"
            raise self._error(problem, f"return a dictionary {{module: {allowed}}}")
        return dict(layers)

    def sequence_plan(self, model: nn.Module) -> SequencePlan | CannotShard:
        plan = getattr(self._task, "sequence_plan", None)
        if plan is None:
            return super().sequence_plan(model)
        layers = self._layers("sequence_plan", plan(model), "after or before")
        if (problem := problem_between(model, layers)) is not None:
            return problem
        cut = getattr(self._task, "sequence_part", None)
        if cut is None:
            reason = "the task has no method sequence_part(batch, index, count)"
            return CannotShard(reason, "add it to the task")

        def part(batch: OwnBatch, index: int, count: int) -> OwnBatch:
            return replace(batch, content=cut(batch.content, index, count))

        return SequencePlan(
            attend=partial(exchanging, model, layers),
            part=part,
            units=dict(getattr(self._task, "sequence_units", {})),
        )

    def pipeline_parts(self, model: nn.Module) -> Sequence[nn.Module] | CannotShard:
        parts = getattr(self._task, "pipeline_parts", None)
        return super().pipeline_parts(model) if parts is None else list(parts(model))

    def _training_batch(self, plan: BatchPlan, share: Share) -> OwnBatch:
        positions = range(share.positions.start, share.positions.stop)
        seeds = [seed_of(plan.seed, "own", share.epoch, position) for position in positions]
        return OwnBatch(
            content=self._content(self._training, share.ids, seeds),
            sample_ids=tuple(share.ids.tolist()),
            step_weight=share.step_weight,
            sample_weights=share.weights,
            step=share.epoch * (self.training_samples // plan.global_batch)
            + share.positions.start // plan.global_batch,
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
        """Read and collate samples; random draws depend on the sample's seed, not on the reader."""
        samples = []
        with preserved_generators():
            for index, seed in zip(ids.tolist(), seeds, strict=True):
                seed_generators(seed)
                samples.append(data[index])
            return self._collate(samples)

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """Summed loss of the task in fp32; a scalar mean is multiplied by the batch's weight."""
        taken_batch = cast("OwnBatch", batch)
        content, calls = taken_batch.content, 0
        if taken_batch.step is not None:
            self._step = taken_batch.step
        step = {"step": self._step} if self._takes_step else {}

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        training = torch.is_grad_enabled() and model.training
        first = training and not self._loss_checked
        parameters = tuple(model.parameters()) if first else ()
        names = [n.removeprefix("module.") for n, _ in model.named_parameters()] if first else []
        before = _states(parameters)
        counting = model.register_forward_pre_hook(count)
        try:
            returned = self._task.loss(model, content, **step)
        finally:
            counting.remove()
        states = zip(parameters, names, before, _states(parameters), strict=True)
        changed = [(parameter, name) for parameter, name, old, new in states if old != new]
        if changed and not any(parameter.requires_grad for parameter, _ in changed):
            raise self._error(
                f"loss changes {changed[0][1]}, a frozen parameter of the model (a teacher, or a"
                " moving average), which a strategy may shard or hold in another precision",
                "change it in after_step(model, step): see 'After each step' in the guide 'Train"
                " your own task'",
            )
        if changed:
            raise self._error(
                f"loss changes {changed[0][1]}, a parameter of the model, or its gradient (by a"
                " backward pass, an optimizer, or max_norm of an embedding), which no strategy"
                " supports",
                "return the loss: the strategy runs the backward pass and takes the step with"
                " recipe.optimizer",
            )
        if calls != self._model_calls:
            raise self._error(
                f"loss calls the model {calls} times, but model_calls is {self._model_calls}",
                f"set model_calls = {calls} in the class"
                if calls
                else "call it as model(...): strategies recognise no other call",
            )
        loss = self._sum_of(returned, batch.weight)
        total = loss.total
        if training and not total.requires_grad:
            raise self._error(
                "loss returns a tensor without a gradient",
                "return the loss as computed from the model's outputs, not detached",
            )
        if first:
            self._loss_checked = self._earlier_leaves is not None
            self._check_all_trained(total, model, content)
        return loss

    @torch.no_grad()
    def after_step(self, model: nn.Module, step: int) -> None:
        seed_generators(seed_of(self._seed, "after_step", step), on_gpu=gpu_in_use())
        named = () if self._hook_checked else model.named_parameters()
        trained = {name: parameter for name, parameter in named if parameter.requires_grad}
        before = _states(trained.values())
        self._task.after_step(model, step)
        after = _states(trained.values())
        for name, old, new in zip(trained, before, after, strict=True):
            if old != new:
                raise self._error(
                    f"after_step changes {name}, a trained parameter",
                    "change frozen parameters and buffers: the optimizer may hold another copy of"
                    " the trained ones",
                )
        self._hook_checked = True

    def _check_all_trained(self, total: Tensor, model: nn.Module, content: Any) -> None:
        """Raise `InputError` if the loss depends on parameters outside the model.

        A loss may take derivatives by leaves of its own.  One that is in the losses of two batches
        is stored somewhere.  Some libraries train other tensors in place of a model's parameters.
        """
        of_batch = {tensor for _, tensor in _reachable(content, "batch")}
        of_batch |= {leaf for tensor in of_batch for leaf in _leaves(tensor)}
        outside = _leaves(total) - {*model.parameters()} - of_batch
        earlier = {leaf for ref in self._earlier_leaves or () if (leaf := ref()) is not None}
        self._earlier_leaves = [weakref.ref(leaf) for leaf in outside]
        if not outside:
            return
        paths: dict[Tensor, str] = {}
        for path, tensor in _reachable(self._task, "self", model):
            paths.setdefault(tensor, path)
        unwrapped = model.module if isinstance(model, DistributedDataParallel) else model
        original = type(unwrapped) is self._model_type
        for leaf in outside:
            parameter = isinstance(leaf, nn.Parameter)
            if (parameter and (original or leaf in paths)) or (original and leaf in earlier):
                name = paths.get(leaf, f"a tensor of shape {tuple(leaf.shape)}")
                raise self._error(
                    f"the loss depends on {name}, which is not part of the model and not trained",
                    "make it part of model(); or, if it is a teacher, freeze it: "
                    f"{paths.get(leaf, 'teacher')}.requires_grad_(False)",
                )

    def _sum_of(self, returned: object, weight: float) -> LossSum:
        if isinstance(returned, Tensor) and returned.numel() == 1:
            if weight == 0 and not returned.isfinite():  # synchronises in this case only
                problem = f"a micro-batch has weight 0, and its mean loss is {returned.item()}"
                raise self._error(problem, "return (sum, weight)")
            return LossSum(total=returned.reshape(()).float() * weight, weight=weight)
        if isinstance(returned, tuple) and len(returned) == 2:
            total, divisor = returned
            if isinstance(total, Tensor) and total.numel() == 1:
                scalar = isinstance(divisor, int | float | np.number)
                if isinstance(divisor, Tensor) and divisor.numel() == 1:
                    divisor, scalar = divisor.detach().reshape(()), True
                if not scalar:
                    problem = f"loss returns two values, and the second, {_described(divisor)},"
                    raise self._error(
                        f"{problem} is no weight",
                        "return (sum, weight), both scalars; or the mean alone, without outputs",
                    )
                total = total.reshape(()).float()
                return LossSum(total=total, weight=divisor, known_before=self.weights_known)
        raise self._error(
            f"loss returns {_described(returned)}",
            "return (sum, weight), both scalars; or the mean as a scalar tensor",
        )

    @torch.no_grad()
    def evaluate(self, model: nn.Module, shard: Shard, device: torch.device) -> dict[str, Tensor]:
        """Sums of the task over the shard's validation batches, on the CPU, in fp64."""
        sums: dict[str, Tensor] = {}
        for batch in self._validated(self._validation_batch, shard):
            batch_sums = self._sums(model, batch.to(device))
            doubles = {
                name: torch.as_tensor(value).detach().to(torch.float64)
                for name, value in batch_sums.items()
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
            problem = f"evaluate returns a {type(sums).__name__}"
            raise self._error(problem, "return a dictionary of sums")
        return sums

    def quality(self, parts: Iterable[object]) -> Mapping[str, float | None]:
        """Metrics of the task, from the sums over all validation samples."""
        sums = {name: v.item() if v.numel() == 1 else v for name, v in added(parts).items()}
        if not sums:
            return {}
        metrics = getattr(self._task, "metrics", None)
        if metrics is None:
            if sums["weight"] == 0:
                raise self._error(
                    "the weights of the validation samples sum to 0", "use more samples"
                )
            return {DEFAULT_METRIC: float(sums["loss"] / sums["weight"])}
        values = metrics(sums)
        if not isinstance(values, Mapping):
            problem = f"metrics returns a {type(values).__name__}"
            raise self._error(problem, "return a dictionary of numbers")
        for name in values:
            if not (isinstance(name, str) and name.isidentifier()) or (
                name in METRICS and METRICS[name].group != "quality"
            ):
                raise self._error(
                    f"metrics returns the name {name!r}",
                    "use letters, digits and _, and no name of a performance metric",
                )
        return {name: float(value) for name, value in values.items()}


def _create_task(options: OwnOptions) -> Any:
    """Create the user's object; `InputError` if that fails or a method is not supported."""
    create = user_function(options.task, "workload.task")
    try:
        task = create(**options.options)
    except TypeError as error:
        arguments = ", ".join(f"{key}={value!r}" for key, value in options.options.items())
        raise InputError(
            "workload.options",
            f"{options.task} cannot be created with {arguments or 'no arguments'}: {error}",
            f"its arguments are {inspect.signature(create)}",
        ) from error
    missing = [name for name in REQUIRED_METHODS if not callable(getattr(task, name, None))]
    if missing:
        raise InputError(
            "workload.task",
            f"{options.task} has no method {', '.join(missing)}",
            f"required: {', '.join(REQUIRED_METHODS)}",
        )
    for name, reason in UNSUPPORTED_METHODS.items():
        if callable(getattr(task, name, None)):
            raise InputError("workload.task", f"{options.task} has a method {name}", reason)
    if callable(getattr(task, "evaluate", None)) and not hasattr(task, "metrics"):
        raise InputError(
            "workload.task",
            f"{options.task} has evaluate(), which returns sums, but no metrics(sums)",
            "add metrics(sums), which returns a dictionary of numbers",
        )
    return task


def _default_collate(samples: list[Any]) -> Any:
    """Collate samples with torch's default; `InputError` if it cannot join them."""
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        if error_kind(error) == "out_of_memory":
            raise
        first, *others = map(_shapes, samples)
        problem = f"torch's default collate cannot join the samples: {error}"
        for at, other in enumerate(others, start=1):
            if differing := [pair for pair in zip(first, other, strict=False) if len({*pair}) > 1]:
                one, two = differing[0]
                problem = f"samples 0 and {at} of a batch differ in shape ({one} and {two})"
                break
        remedy = "write a method collate(samples) that pads, packs or converts them"
        raise InputError("workload.task", problem, remedy) from error


def _shapes(sample: Any) -> list[object]:
    """Shape of every array in the sample, in order, and type of every other value."""
    if isinstance(sample, Mapping):
        sample = list(sample.values())
    if isinstance(sample, list | tuple):
        return [shape for item in sample for shape in _shapes(item)]
    return [tuple(sample.shape) if isinstance(sample, _ARRAY) else type(sample)]


def _described(value: object) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, _ARRAY) else ""
    return f"a {type(value).__name__}{shape}"


def _states(parameters: Iterable[nn.Parameter]) -> list[tuple[bool, int]]:
    """Missing gradient and version counter of each parameter; training changes them."""
    return [(parameter.grad is None, parameter._version) for parameter in parameters]


def _leaves(total: Tensor) -> set[Tensor]:
    """Tensors that get a gradient in the backward pass of `total`."""
    seen: set[Any] = {total.grad_fn} - {None}  # None if it is a parameter itself
    waiting = [*seen]
    while waiting:
        following = {node for node, _ in waiting.pop().next_functions} - {None} - seen
        seen |= following
        waiting.extend(following)
    return {node.variable for node in seen if hasattr(node, "variable")}


def _reachable(value: Any, path: str, *skipped: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in an object's attributes, and in containers, objects and modules there.

    A module's parameters have the path of the module; `skipped` modules are left out.
    """
    seen = {id(module) for root in skipped for module in root.modules()}
    waiting = deque([(path, value)])
    while waiting and len(seen) < MAX_OBJECTS:
        path, value = waiting.popleft()
        if id(value) in seen or isinstance(value, type | ModuleType | FunctionType):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield path, value
        elif isinstance(value, Mapping):
            waiting += ((f"{path}[{key!r}]", item) for key, item in value.items())
        elif isinstance(value, list | tuple | set | deque):
            waiting += ((f"{path}[{index}]", item) for index, item in enumerate(value))
        elif hasattr(value, "__dict__"):
            if isinstance(value, nn.Module):
                yield from ((path, parameter) for parameter in value.parameters())
            attributes = {**vars(type(value)), **vars(value)}
            waiting += ((f"{path}.{name}", item) for name, item in attributes.items())


build = OwnTask
