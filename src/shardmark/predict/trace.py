"""Traces one step of the user's own model and loss: without memory, or really on the CPU."""

from __future__ import annotations

import logging
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import torch
import torch.utils._pytree as pytree  # torch has no public one
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # torch has no public one
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper

from shardmark.core.errors import InputError
from shardmark.core.layout import REPLICATED_ACTIVATIONS, ActivationSharding
from shardmark.core.recipe import Optimizer, Recipe
from shardmark.core.shares import Shard
from shardmark.core.traffic import ModelSize, matrix_shapes
from shardmark.predict.division import Division
from shardmark.predict.profile import Amount, Moment, Operation, Profile, Unit
from shardmark.strategies.blocks import wrapped
from shardmark.strategies.casting import cast_inputs, let_norms_mix, widen_outputs
from shardmark.strategies.execution import prepare
from shardmark.strategies.initial_weights import hollow_model
from shardmark.strategies.layers.divided import styled_modules
from shardmark.strategies.step import AUTOCAST_DTYPES, autocast, made_optimizer, share_of_step
from shardmark.workloads.base import Batch, BatchPlan, TensorPlan, Workload
from shardmark.workloads.flops import convolution_backward_flops
from shardmark.workloads.model_building import generators_kept, seed_generators
from shardmark.workloads.sampled_task import with_tensors

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
SAMPLES = (4, 8)
"""Of the two steps: all other sizes are on the line through them."""
aten = torch.ops.aten
FLOPS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    aten.convolution_backward: shape_wrapper(convolution_backward_flops),  # type: ignore[no-untyped-call]
}
CONVOLUTIONS = {aten.convolution: 1, aten.convolution_backward: 2}
"""Which of the arguments is the weight."""
ASKING = {"prim", "profiler"}
"""Namespaces of what is dispatched and computes nothing: a fake tensor's device, marks."""
Kind = Literal["product", "convolution", "other"]
Pass = Literal["forward", "backward", "gradient"]


class _Sum(NamedTuple):
    """Something counted, and how much of it ranks that divide layers each have whole."""

    all: float = 0.0
    whole: float = 0.0

    def plus(self, value: float, whole: float) -> _Sum:
        return _Sum(self.all + value, self.whole + whole)

    def beyond(self, other: _Sum) -> _Sum:
        return _Sum(self.all - other.all, self.whole - other.whole)


NOTHING = _Sum()


@dataclass(slots=True)
class _Counts:
    flops: _Sum = NOTHING
    bytes: _Sum = NOTHING
    calls: int = 0


@dataclass(slots=True)
class _Part:
    """A unit as it was passed once."""

    name: str
    block: bool
    first_node: int
    """Nodes of the autograd graph are numbered in the order in which they are made."""
    begun_bytes: _Sum
    """Live before its forward pass."""
    saved_bytes: _Sum = NOTHING
    parameters: list[nn.Parameter] = field(default_factory=list)
    replicated_fraction: float = 0.0
    gradient_bytes: int = 0
    entered_bytes: _Sum = NOTHING
    """Live before its backward pass."""
    reduced_bytes: _Sum = NOTHING
    """Live after the last of its gradients was complete."""
    counts: dict[tuple[Pass, Kind], _Counts] = field(default_factory=lambda: defaultdict(_Counts))
    moments: dict[Pass, list[tuple[_Sum, int]]] = field(default_factory=lambda: defaultdict(list))
    """After each operation: live bytes but those of complete gradients, and the part's of these."""


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages from their first operation until they are freed."""

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.bytes = self.peak = 0
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.add(held, counted=False)

    def add(self, tensors: Iterable[Tensor], *, counted: bool = True) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = id(storage)
            if key in self._storages:
                continue
            size = storage.nbytes() if counted else 0
            self._storages[key] = (weakref.ref(storage, partial(self._freed, key)), size)
            self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def release(self, tensor: Tensor) -> int:
        """Bytes that are counted elsewhere from now on."""
        key = id(tensor.untyped_storage())
        reference, size = self._storages[key]
        self._storages[key] = (reference, 0)
        self.bytes -= size
        self.left(key)
        return size

    def _freed(self, key: int, _: object) -> None:
        self.bytes -= self._storages.pop(key)[1]
        self.left(key)

    def left(self, storage: int) -> None:
        """As it is freed, or counted elsewhere."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace in ASKING:
            return function(*args, **(kwargs or {}))
        self.operates()
        made = function(*args, **(kwargs or {}))
        self.add(_tensors(made))
        self.operated(function, args, kwargs or {}, made)
        return made

    def operates(self) -> None:
        """Before each operation."""

    def operated(self, function: Any, args: Any, kwargs: Any, made: Any) -> None:
        """After each operation."""


class _Step(_Live):
    """One forward and backward pass, unit by unit."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        batch: Batch,
        device_type: str,
        division: Division | None,
    ) -> None:
        self._division = division
        self._whole = 0
        self._whole_of: dict[int, int] = {}
        super().__init__((*model.parameters(), *model.buffers()))
        self._device_type = device_type
        self.add(_tensors(vars_of(batch)))
        self._keep_whole({key: size for key, (_, size) in self._storages.items() if size})
        self.batch_bytes = self._before = self._live
        self.parts: list[_Part] = []
        self._first_nodes: list[int] = []
        self._backward_at: int | None = None
        self._owners: dict[int, _Part] = {}
        names = {module: name for name, module in model.named_modules()}
        self.block_names = [names[block] for block in blocks]
        own = set(blocks)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._complete)  # type: ignore[no-untyped-call]
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        for module in model.modules():
            if module in own:
                enter = partial(self._enter, names[module])
                self._hooks.append(module.register_forward_pre_hook(enter))
                self._hooks.append(module.register_forward_hook(self._leave))
            else:
                self._hooks.append(module.register_forward_pre_hook(self._meet))
        self._begin("start", block=False)

    @property
    def _live(self) -> _Sum:
        return _Sum(self.bytes, self._whole)

    def _keep_whole(self, sizes: Mapping[int, int]) -> None:
        for key, size in sizes.items():
            self._whole_of[key] = self._whole_of.get(key, 0) + size
            self._whole += size

    def left(self, storage: int) -> None:
        self._whole -= self._whole_of.pop(storage, 0)
        if self._division is not None:
            self._division.forget(storage)

    def backward(self, loss: Tensor) -> None:
        self._end()
        self._backward_at = len(self.parts) - 1
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        for hook in self._hooks:
            hook.remove()

    def _begin(self, name: str, *, block: bool) -> None:
        node: int = torch._C._autograd._get_sequence_nr()
        self.parts.append(_Part(name, block, first_node=node, begun_bytes=self._live))
        self._first_nodes.append(node)

    def _end(self) -> None:
        self.parts[-1].saved_bytes = self._live.beyond(self.parts[-1].begun_bytes)

    def _enter(self, name: str, module: nn.Module, _: object) -> None:
        if self._backward_at is None:
            self._end()
            self._begin(name, block=True)
            self._own(module.parameters())

    def _leave(self, *_: object) -> None:
        if self._backward_at is None:
            self._end()
            self._begin(f"after {self.parts[-1].name}", block=False)

    def _meet(self, module: nn.Module, _: object) -> None:
        self._own(module.parameters(recurse=False))

    def _own(self, parameters: Iterable[nn.Parameter]) -> None:
        """A parameter belongs to the unit that first uses it."""
        for parameter in parameters:
            if id(parameter) not in self._owners:
                self._owners[id(parameter)] = self.parts[-1]
                self.parts[-1].parameters.append(parameter)

    def own_rest(self, model: nn.Module) -> None:
        """What no module of its own has used belongs to the first unit."""
        for parameter in model.parameters():
            if id(parameter) not in self._owners:
                self.parts[0].parameters.append(parameter)
        if self._division is not None:
            for part in self.parts:
                part.replicated_fraction = self._division.replicated_fraction(part.parameters)

    def _complete(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        part = self._owners.get(id(parameter), self.parts[0])
        part.moments["gradient"].append((self._live, part.gradient_bytes))
        size = sum(map(self.release, _tensors(parameter.grad)))
        part.gradient_bytes += size
        part.reduced_bytes = self._live

    def _inside(self, packet: Any, args: Any) -> int:
        """Bytes that the kernel takes for itself, which nobody outside sees."""
        if self._device_type == "cpu" and packet in CONVOLUTIONS:
            weight: Tensor = args[CONVOLUTIONS[packet]]
            return weight.nbytes  # in oneDNN's own format
        return 0

    def operates(self) -> None:
        self._before = self._live

    def operated(self, function: Any, args: Any, kwargs: Any, made: Any) -> None:
        again = False
        if self._backward_at is not None:
            node = torch._C._current_autograd_node()
            number = -1 if node is None else node._sequence_nr()
            if 0 <= number < 2**63:  # else it hands a gradient to its parameter
                self._backward_at = max(0, bisect_right(self._first_nodes, number) - 1)
            again = torch.is_grad_enabled()  # activation checkpointing
        in_pass: Pass = "forward" if self._backward_at is None else "backward"
        part = self.parts[-1 if self._backward_at is None else self._backward_at]
        if in_pass == "backward" and not part.moments["backward"]:
            part.entered_bytes = self._before
        packet = function.overloadpacket
        given, results = _tensors((args, kwargs)), _tensors(made)
        message = 0
        if self._division is not None:
            backwards = in_pass == "backward" and not again
            message, kept = self._division.follow(packet, given, results, backward=backwards)
            self._keep_whole(kept)
        inside = self._inside(packet, args)
        live = self._live.plus(inside, message)
        part.moments[in_pass].append((live, part.gradient_bytes))
        if function.is_view or again:
            return
        kind: Kind = "convolution" if packet in CONVOLUTIONS else "product"
        if packet in FLOPS:
            flops = FLOPS[packet](*args, **kwargs, out_val=made)
        else:
            kind = "other"
            flops = sum(tensor.numel() for tensor in results)
        counts = part.counts[in_pass, kind]
        moved = [*given, *results]
        whole = [each for each in moved if self._division and not self._division.divides(each)]
        counts.flops = counts.flops.plus(flops, flops if len(whole) == len(moved) else 0.0)
        counts.bytes = counts.bytes.plus(*(sum(t.nbytes for t in each) for each in (moved, whole)))
        counts.calls += 1


def trace(
    workload: Workload,
    recipe: Recipe,
    *,
    device_type: str = "cuda",
    division: ActivationSharding = REPLICATED_ACTIVATIONS,
) -> Profile:
    """Two steps of few samples each, on fake tensors; really on the CPU where these cannot.

    `device_type` chooses the kernels, `division` what is divided where ranks share layers.
    Raises what the model or its loss raises in a real step.
    """
    traced = partial(_profile, workload, recipe, device_type, division)
    with generators_kept():
        profile = traced(None)
        if recipe.precision == "fp32":
            return profile
        try:
            native = traced(AUTOCAST_DTYPES[recipe.precision])
        except Exception as error:  # as its strategies would refuse it
            logger.info("the model does not compute with 16-bit parameters: %s", error)
            return profile
    return replace(profile, native=native)


def _profile(
    workload: Workload,
    recipe: Recipe,
    device_type: str,
    division: ActivationSharding,
    casts: torch.dtype | None,
) -> Profile:
    """Under autocast, or with parameters in that type."""
    sizes = [min(count, workload.training_samples) for count in SAMPLES]
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    taken = partial(
        _steps, workload, recipe, sizes, device_type=device_type, division=division, casts=casts
    )
    try:
        model, first, second = taken(fake=fake)
    except Exception as error:  # shapes or values that are not known
        logger.info("traced by real steps, since fake tensors cannot: %s", error)
        model, first, second = taken(fake=None)
    passed, again = ([part.name for part in step.parts] for step in (first, second))
    if passed != again:
        other = next(a or b for a, b in zip_longest(passed, again) if a != b)
        found = f"two steps with the same seed use different parts of it: {other}"
        raise InputError("the model", found, "draw from torch's, numpy's or random's generators")
    line = partial(_line, sizes[0], sizes[1])
    units = tuple(_unit(a, b, line) for a, b in zip(first.parts, second.parts, strict=True))
    state, temporary, together = _of_update(recipe.optimizer, device_type)
    return Profile(
        units=units,
        size=ModelSize(
            parameters=sum(unit.parameters for unit in units),
            trained_parameters=sum(unit.trained_parameters for unit in units),
            trained_matrices=matrix_shapes(p.shape for p in model.parameters() if p.requires_grad),
            units=max(
                1, len({unit.name if unit.block else "" for unit in units if unit.parameters})
            ),
        ),
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        batch_bytes=line(first.batch_bytes, second.batch_bytes),
        state_values=state,
        update_values=temporary,
        updates_together=together,
        unused=tuple(dict.fromkeys(first.block_names) - dict.fromkeys(passed).keys()),
    )


def _steps(
    workload: Workload,
    recipe: Recipe,
    sizes: Sequence[int],
    *,
    device_type: str,
    division: ActivationSharding,
    casts: torch.dtype | None,
    fake: FakeTensorMode | None,
) -> tuple[nn.Module, _Step, _Step]:
    eager = recipe.model_copy(update={"compile": "none"})
    model = (hollow_model(workload) if fake else None) or workload.build_model()
    plan = workload.tensor_plan(model)  # names modules as they are before they are wrapped
    styled = [*styled_modules(model, plan).values()] if isinstance(plan, TensorPlan) else None
    prepare(model, workload, eager)
    blocks = wrapped(model, "blocks", workload.blocks(model))
    if fake is not None:
        _make_fake(model, fake, casts)
    if casts is not None:
        for parameter in () if fake else model.parameters():
            parameter.data = parameter.data.to(casts)
        for unit in (*blocks, model):
            cast_inputs(unit, casts)
        let_norms_mix(model)
        widen_outputs(model)
    made = []
    for size in sizes:
        drawn = BatchPlan(global_batch=size, seed=recipe.seed)
        batch = next(iter(workload.batches(drawn, Shard(index=0, count=1)))).to(CPU)
        if fake is not None:
            batch = with_tensors(batch, fake.from_tensor)
        divided = None if styled is None else Division(styled, division)
        step = _Step(model, blocks, batch, device_type, divided)
        kernels = _kernels_of_gpus() if device_type == "cuda" and fake else nullcontext()
        seed_generators(recipe.seed)  # a model that skips layers by chance skips the same ones
        with fake or nullcontext(), kernels, step:
            with nullcontext() if casts else autocast(recipe, CPU):
                loss = workload.loss(model, batch)
                share = share_of_step(loss, batch.step_weight, 1)
            del loss
            step.backward(share)
        step.own_rest(model)
        model.zero_grad(set_to_none=True)
        made.append(step)
    return model, made[0], made[1]


@contextmanager
def _kernels_of_gpus() -> Iterator[None]:
    """Attention stays fused with dropout, whose masks have a byte for each value.

    On a CPU the first is done in its parts, and the second keeps factors.
    """
    attention, dropout = functional.scaled_dot_product_attention, functional.dropout

    def fused(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,  # noqa: ARG001
        **others: Any,
    ) -> Tensor:
        return attention(query, key, value, attn_mask, **others)

    def masked(
        input: Tensor,  # noqa: A002
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,  # noqa: ARG001
    ) -> Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p else input

    functional.scaled_dot_product_attention = fused  # type: ignore[assignment]
    functional.dropout = masked
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = attention
        functional.dropout = dropout


def _make_fake(model: nn.Module, fake: FakeTensorMode, casts: torch.dtype | None) -> None:
    """Parameters and buffers without memory, in place; tied ones stay tied."""
    made: dict[int, Any] = {}

    def converted(tensor: Tensor) -> Any:
        if id(tensor) not in made:
            is_cast = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
            dtype = casts if casts is not None and is_cast else tensor.dtype
            with fake:
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
            trained = tensor.requires_grad
            made[id(tensor)] = (
                nn.Parameter(empty, requires_grad=trained)
                if isinstance(tensor, nn.Parameter)
                else empty
            )
        return made[id(tensor)]

    kept = [*model.parameters(), *model.buffers()]  # while they live, no other has their id
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = converted(tensor)
    del kept


def vars_of(batch: Batch) -> list[Any]:
    return [getattr(batch, name) for name in batch.__dataclass_fields__]  # type: ignore[attr-defined]


def _tensors(values: Any) -> list[Tensor]:
    """Tensors with storage: a sparse one is its indices and values."""
    leaves = [each for each in pytree.tree_leaves(values) if isinstance(each, Tensor)]
    parts = ([t._indices(), t._values()] if t.is_sparse else [t] for t in leaves)
    return [each for of_leaf in parts for each in of_leaf]


def _line(first_samples: int, second_samples: int, first: _Sum, second: _Sum) -> Amount:
    more = second_samples - first_samples
    slope = (second.all - first.all) / more if more else first.all / first_samples
    whole = second.whole / second.all if second.all else 0.0
    return Amount(fixed=first.all - slope * first_samples, per_sample=slope, whole=whole)


def _unit(first: _Part, second: _Part, line: Callable[[_Sum, _Sum], Amount]) -> Unit:
    trained = [parameter for parameter in first.parameters if parameter.requires_grad]
    return Unit(
        name=first.name,
        parameters=sum(p.numel() for p in first.parameters),
        trained_parameters=sum(p.numel() for p in trained),
        replicated_fraction=first.replicated_fraction,
        gradient_bytes=first.gradient_bytes,
        sizes=tuple(p.numel() for p in trained),
        block=first.block,
        forward=_operations(first, second, "forward", line),
        backward=_operations(first, second, "backward", line),
        begun_bytes=line(first.begun_bytes, second.begun_bytes),
        entered_bytes=line(first.entered_bytes, second.entered_bytes),
        reduced_bytes=line(first.reduced_bytes, second.reduced_bytes),
        saved_bytes=line(first.saved_bytes, second.saved_bytes),
        forward_moments=_moments(first, second, "forward", line),
        backward_moments=_moments(first, second, "backward", line),
        gradient_moments=_moments(first, second, "gradient", line),
    )


def _operations(
    first: _Part, second: _Part, in_pass: Pass, line: Callable[[_Sum, _Sum], Amount]
) -> tuple[Operation, ...]:
    kinds: tuple[Kind, ...] = ("product", "convolution", "other")
    pairs = ((kind, first.counts[in_pass, kind], second.counts[in_pass, kind]) for kind in kinds)
    return tuple(
        Operation(
            kind=kind, flops=line(a.flops, b.flops), bytes=line(a.bytes, b.bytes), calls=b.calls
        )
        for kind, a, b in pairs
        if b.calls
    )


def _moments(
    first: _Part, second: _Part, in_pass: Pass, line: Callable[[_Sum, _Sum], Amount]
) -> tuple[Moment, ...]:
    """Those that can be the fullest; where operations depend on values, the fullest of each."""
    pairs = [*zip_longest(first.moments[in_pass], second.moments[in_pass])]
    if any(a is None or b is None for a, b in pairs):
        one, other = first.moments[in_pass], second.moments[in_pass]
        pairs = [(max(one or other), max(other or one))]
    front: list[tuple[float, float, float, float]] = []
    for a, b in pairs:
        amount = line(a[0], b[0])
        point = (amount.fixed, amount.per_sample, amount.whole, b[1])
        if not any(_covers(other, point) for other in front):
            front = [other for other in front if not _covers(point, other)] + [point]
    return tuple(
        Moment(bytes=Amount(fixed=fixed, per_sample=each, whole=whole), gradient_bytes=gradients)
        for fixed, each, whole, gradients in front
    )


def _covers(point: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(mine >= theirs for mine, theirs in zip(point, other, strict=True))


def _of_update(spec: Optimizer, device_type: str) -> tuple[float, float, bool]:
    """Values of state and temporary ones for each element, and whether all are updated together."""
    if device_type == "cuda" and spec.name != "own" and spec.implementation == "default":
        spec = spec.model_copy(update={"implementation": "foreach"})  # torch's choice there
    elements, peaks, state = 1000, [], 0.0
    for count in (1, 2):
        tensors = [nn.Parameter(torch.ones(elements)) for _ in range(count)]
        optimizer = made_optimizer(tensors, spec)
        for tensor in tensors:
            tensor.grad = torch.ones(elements)
        optimizer.step()
        held = [each for each in _tensors(dict(optimizer.state)) if each.numel() == elements]
        state = len(held) / count
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        live = _Live((*tensors, *gradients, *held))
        with live:
            optimizer.step()
        peaks.append(live.peak / (4 * elements))
    return state, peaks[0], peaks[1] > 1.8 * peaks[0]
