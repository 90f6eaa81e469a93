"""Traces a step of the user's own model and loss, without memory or really on the CPU."""

from __future__ import annotations

import logging
import sys
import warnings
import weakref
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from math import ceil, prod
from typing import Any, get_args

import numpy as np
import torch
import torch.utils._pytree as pytree  # torch has no public one
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # torch has no public one
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper

from shardmark.base.errors import InputError
from shardmark.base.layout import REPLICATED_ACTIVATIONS, ActivationSharding, Shard
from shardmark.base.recipe import Optimizer, Recipe, Weights
from shardmark.base.traffic import (
    ELEMENT_BYTES,
    FROZEN_ELEMENT_BYTES,
    ModelSize,
    frozen_element_bytes,
    matrix_shapes,
    stored_element_bytes,
)
from shardmark.predict.profile import Amount, Kind, Moment, Operation, Profile, Unit
from shardmark.predict.trace.chains import Chains, Total, Work
from shardmark.predict.trace.detectors import at_their_limits, limited_heads
from shardmark.predict.trace.repeated_layers import (
    Repetition,
    UnequalLayers,
    expand,
    shortened_copy,
)
from shardmark.predict.trace.tensor_sharding import TensorSharding, storage_key
from shardmark.predict.trace.unit_trace import Moments, Pass, UnitTrace
from shardmark.ranks.costs.base import FP32_BYTES
from shardmark.ranks.strategies.blocks import checkpointed_blocks, hidden_matrices, sharding_units
from shardmark.ranks.strategies.casting import (
    allow_mixed_dtype_batch_norm,
    cast_inputs,
    widen_outputs,
)
from shardmark.ranks.strategies.execution import prepare
from shardmark.ranks.strategies.initial_weights import build_on_meta
from shardmark.ranks.strategies.layers.divided import styled_modules
from shardmark.ranks.strategies.optimizers import HIDDEN_MATRIX, check_hidden_matrices
from shardmark.ranks.strategies.step import (
    AUTOCAST_DTYPES,
    autocast,
    create_optimizer,
    share_of_step,
)
from shardmark.ranks.workloads.base import Batch, BatchPlan, TensorPlan, Workload
from shardmark.ranks.workloads.flops import UNKNOWN_TO_TORCH
from shardmark.ranks.workloads.model_building import preserved_generators, seed_generators
from shardmark.ranks.workloads.sampled_task import with_tensors

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
SAMPLES = (4, 8)
"""Samples of the two traced steps.  Other sizes are extrapolated linearly."""
REAL_SAMPLES = (1, 2)
"""The same of steps that really compute, which take the time and memory of a step on the CPU."""
ELEMENTS = 2**12
"""Elements of the tensors on which an optimizer is measured.  Optimizers in 8 bits need so many."""
aten = torch.ops.aten
FLOPS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    **{operator: shape_wrapper(formula) for operator, formula in UNKNOWN_TO_TORCH.items()},  # type: ignore[no-untyped-call]
}
CONVOLUTIONS = {aten.convolution: 1, aten.convolution_backward: 2}
"""Position of the weight among the arguments, behind the input."""
AFTER_WEIGHT = (2, 4, 7)
"""Positions of strides, dilations and groups behind the weight."""
QUERY_NAMESPACES = {"prim", "profiler"}
"""Namespaces of operators that compute nothing, such as a fake tensor's device."""


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages from their first operation until they are freed."""

    def __init__(self, uncounted: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.bytes = self.peak = 0
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.add(uncounted, counted=False)

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
        """Stop counting a tensor that is still alive; return its bytes."""
        key = id(tensor.untyped_storage())
        reference, size = self._storages[key]
        self._storages[key] = (reference, 0)
        self.bytes -= size
        self.on_removed(key)
        return size

    def _freed(self, key: int, _: object) -> None:
        self.bytes -= self._storages.pop(key)[1]
        self.on_removed(key)

    def on_removed(self, storage: int) -> None:
        """Called when a storage is freed or released."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace in QUERY_NAMESPACES:
            # Most calls of a trace ask this, and torch's own answer goes through all modes again.
            if function is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
                mode, device = args[0].fake_mode, args[0].fake_device
                return torch.device("meta") if mode.in_kernel_invocation else device
            return function(*args, **(kwargs or {}))
        self.before_operation()
        outputs = function(*args, **(kwargs or {}))
        self.add(_tensors(outputs))
        self.after_operation(function, args, kwargs or {}, outputs)
        return outputs

    def before_operation(self) -> None:
        """Called before each operation."""

    def after_operation(self, function: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        """Called after each operation."""


class _StepTrace(_LiveBytes):
    """Records a forward and a backward pass, unit by unit."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        batch: Batch,
        recipe: Recipe,
        *,
        device_type: str,
        sharding: TensorSharding | None,
    ) -> None:
        self._sharding = sharding
        self._compile = recipe.compile
        checkpointing = recipe.activation_checkpointing
        self._repeats_forward = checkpointing is True
        self._compiled_nodes: list[int] = []
        """Numbers of the autograd nodes at which compiled code begins and ends."""
        self._chains = Chains()
        self._recomputed: dict[int, int] = {}
        """Bytes, by storage, of results that compiled code computes again in the backward pass
        instead of saving them."""
        self._saved_outputs: dict[int, list[Tensor]] = defaultdict(list)
        """Outputs of products, by unit: compiled code saves them to compute the rest again."""
        self._replicated_bytes = 0
        self._replicated_by_storage: dict[int, int] = {}
        super().__init__((*model.parameters(), *model.buffers()))
        self._device_type = device_type
        self.add(_tensors(vars_of(batch)))
        self._add_replicated({key: size for key, (_, size) in self._storages.items() if size})
        self.batch_bytes = self._live_before = self._live
        self.units: list[UnitTrace] = []
        self._first_nodes: list[int] = []
        self._backward_at: int | None = None
        self._owners: dict[int, UnitTrace] = {}
        names = {module: name for name, module in model.named_modules()}
        self.block_names = [names[block] for block in blocks]
        self._checkpoints = {names[block] for block in checkpointed_blocks(blocks, checkpointing)}
        block_set = set(blocks)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._complete_gradient)  # type: ignore[no-untyped-call]
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        for module in model.modules():
            if module in block_set:
                enter = partial(self._enter_block, names[module])
                self._hooks.append(module.register_forward_pre_hook(enter))
                self._hooks.append(module.register_forward_hook(self._leave_block))
            else:
                self._hooks.append(module.register_forward_pre_hook(self._enter_module))
        if self._compile == "model":
            self._hooks.append(model.register_forward_pre_hook(self._note_node))
            self._hooks.append(model.register_forward_hook(self._leave_compiled))
        self._begin_unit("start", block=False)

    @property
    def _live(self) -> Total:
        return Total(self.bytes, self._replicated_bytes)

    def _add_replicated(self, sizes: Mapping[int, int]) -> None:
        """Count these bytes, by storage, as held in full by every tensor-parallel rank."""
        for key, size in sizes.items():
            self._replicated_by_storage[key] = self._replicated_by_storage.get(key, 0) + size
            self._replicated_bytes += size

    def _note_node(self, *_: object) -> None:
        self._compiled_nodes.append(torch._C._autograd._get_sequence_nr())

    def _leave_compiled(self, _: nn.Module, __: object, outputs: object) -> None:
        self._note_node()
        self._save(_tensors(outputs))

    def _save(self, tensors: Iterable[Tensor]) -> None:
        """Count the results of compiled code, which are tensors in memory."""
        for tensor in tensors:
            if (key := storage_key(tensor)) in self._recomputed:
                self._storages[key] = (self._storages[key][0], self._recomputed.pop(key))
                self.bytes += self._storages[key][1]

    def _leave_unsaved(self, tensors: Iterable[Tensor]) -> None:
        """Count no bytes for results of compiled code that its backward pass computes again."""
        for tensor in tensors:
            reference, size = self._storages[key := storage_key(tensor)]
            if size:
                self._storages[key] = (reference, 0)
                self._recomputed[key] = size
                self.bytes -= size

    def _is_compiled(self, unit: UnitTrace, node: int) -> bool:
        """True for an operation of compiled code; `node` is that of the backward pass, or -1."""
        if self._compile != "model":
            return self._compile == "blocks" and unit.block
        if self._backward_at is None:
            return len(self._compiled_nodes) == 1
        return bool(self._compiled_nodes) and (
            self._compiled_nodes[0] <= node < self._compiled_nodes[-1]
        )

    def on_removed(self, storage: int) -> None:
        self._chains.forget(storage)
        self._recomputed.pop(storage, None)
        self._replicated_bytes -= self._replicated_by_storage.pop(storage, 0)
        if self._sharding is not None:
            self._sharding.forget(storage)

    def backward(self, loss: Tensor) -> None:
        """Run and record the backward pass, then remove the hooks."""
        self._end_unit()
        self._backward_at = len(self.units) - 1
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        for hook in self._hooks:
            hook.remove()
        for unit in self.units:
            unit.collect_moments()

    def _begin_unit(self, name: str, *, block: bool) -> None:
        node: int = torch._C._autograd._get_sequence_nr()
        self.units.append(UnitTrace(name, block, first_node=node, begun_bytes=self._live))
        self._first_nodes.append(node)

    def _end_unit(self) -> None:
        self.units[-1].saved_bytes = self._live.minus(self.units[-1].begun_bytes)

    def _enter_block(self, name: str, module: nn.Module, inputs: object) -> None:
        if self._backward_at is None:
            if name in self._checkpoints:  # the block is computed again from its inputs
                self._save(_tensors(inputs))
            self._end_unit()
            self._begin_unit(name, block=True)
            self._assign(module.parameters())

    def _leave_block(self, _: nn.Module, __: object, outputs: object) -> None:
        if self._backward_at is None:
            if self._compile == "blocks":  # the output of a compiled block is a tensor in memory
                self._save(_tensors(outputs))
            self._end_unit()
            self._begin_unit(f"after {self.units[-1].name}", block=False)

    def _enter_module(self, module: nn.Module, _: object) -> None:
        self._assign(module.parameters(recurse=False))

    def _assign(self, parameters: Iterable[nn.Parameter]) -> None:
        """Assign parameters to the present unit, if no earlier unit has used them."""
        for parameter in parameters:
            if id(parameter) not in self._owners:
                self._owners[id(parameter)] = self.units[-1]
                self.units[-1].parameters.append(parameter)

    def assign_rest(self, model: nn.Module) -> None:
        """Assign the parameters that no module has used to the first unit."""
        for parameter in model.parameters():
            if id(parameter) not in self._owners:
                self.units[0].parameters.append(parameter)
        if self._sharding is not None:
            for unit in self.units:
                unit.replicated_fraction = self._sharding.replicated_fraction(unit.parameters)

    def _complete_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        unit = self._owners.get(id(parameter), self.units[0])
        unit.moments["gradient"].append((self._live, unit.gradient_bytes))
        size = sum(map(self.release, _tensors(parameter.grad)))
        unit.gradient_bytes += size
        unit.reduced_bytes = self._live

    def _workspace_bytes(self, packet: Any, args: Any) -> int:
        """Bytes that the kernel allocates internally, which torch does not see."""
        if self._device_type == "cpu" and packet in CONVOLUTIONS:
            weight: Tensor = args[CONVOLUTIONS[packet]]
            return weight.nbytes  # a copy in oneDNN's format
        return 0

    def before_operation(self) -> None:
        self._live_before = self._live

    def after_operation(self, function: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        node_number, recomputes = self._backward_node()
        in_pass: Pass = "forward" if self._backward_at is None else "backward"
        at = len(self.units) - 1 if self._backward_at is None else self._backward_at
        unit = self.units[at]
        if in_pass == "backward" and not unit.moments["backward"]:
            unit.entered_bytes = self._live_before
            for later in [number for number in self._saved_outputs if number > at]:
                del self._saved_outputs[later]
        packet = function.overloadpacket
        kind = _kind(packet, args)
        read, written = _tensors((args, kwargs)), _tensors(outputs)
        is_view = function.is_view or _returns_inputs(function, read, written)
        message_bytes = 0
        if self._sharding is not None:
            backward = in_pass == "backward" and not recomputes
            message_bytes, replicated_bytes = self._sharding.follow(
                packet, read, written, backward=backward
            )
            self._add_replicated(replicated_bytes)
        compiled = not is_view and self._is_compiled(unit, node_number)
        fused = compiled and kind == "other"
        if fused and (in_pass == "forward" or recomputes):
            self._leave_unsaved(written)
        inputs = set() if fused or is_view else {storage_key(tensor) for tensor in read}
        internal_bytes = self._workspace_bytes(packet, args)
        internal_bytes += sum(self._recomputed.get(key, 0) for key in inputs)
        live = self._live.plus(internal_bytes, message_bytes)
        unit.moments[in_pass].append((live, unit.gradient_bytes))
        if is_view or (recomputes and self._repeats_forward):
            return
        if compiled and not fused and in_pass == "forward" and unit.name not in self._checkpoints:
            self._saved_outputs[at] += written
        operations = unit.operations["repeated" if recomputes else in_pass]
        work = self._chains.work(operations, kind, fused=fused)
        flops, is_replicated = _flops(function, args, kwargs, outputs), True
        again = self._recomputed if in_pass == "backward" else ()
        for tensor, count in self._chains.moved(work, read, written, fused=fused, again=again):
            replicated = self._sharding is not None and not self._sharding.is_sharded(tensor)
            is_replicated = is_replicated and replicated
            work.bytes = work.bytes.plus(count, count if replicated else 0.0)
        work.flops = work.flops.plus(flops, flops if is_replicated else 0.0)

    def _backward_node(self) -> tuple[int, bool]:
        """Return the number of the present autograd node, and whether it computes something again.

        The number is -1 in the forward pass, and while gradients accumulate.
        """
        if self._backward_at is None:
            return -1, False
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        if not 0 <= number < 2**63:  # the node accumulates a parameter's gradient
            return -1, torch.is_grad_enabled()
        self._backward_at = max(0, bisect_right(self._first_nodes, number) - 1)
        return number, torch.is_grad_enabled()  # activation checkpointing


def _returns_inputs(function: Any, read: Sequence[Tensor], written: Sequence[Tensor]) -> bool:
    """True for an operator that computes nothing, such as `_unsafe_view`."""
    inputs = {storage_key(tensor) for tensor in read}
    return not function._schema.is_mutable and all(storage_key(t) in inputs for t in written)


def _kind(packet: Any, args: Any) -> Kind:
    if packet in CONVOLUTIONS:
        at = CONVOLUTIONS[packet]
        strides, dilations, groups = (args[at + after] for after in AFTER_WEIGHT)
        if groups == args[at - 1].shape[1] > 1:
            return "depthwise"
        if groups > 1:
            return "grouped"
        is_small = (*args[at].shape[2:], *strides, *dilations) == (3, 3, 1, 1, 1, 1)
        return "convolution_3x3" if is_small else "convolution"
    if packet in FLOPS:
        return "attention" if "attention" in str(packet) else "product"
    return "other"


def _flops(function: Any, args: Any, kwargs: Any, outputs: Any) -> int:
    packet = function.overloadpacket
    if packet not in FLOPS:
        return sum(tensor.numel() for tensor in _tensors(outputs))
    flops = FLOPS[packet](*args, **kwargs, out_val=outputs)
    names = [argument.name for argument in function._schema.arguments]
    if "is_causal" in names:
        at = names.index("is_causal")
        if args[at] if at < len(args) else kwargs.get("is_causal", False):
            return flops // 2  # kernels skip what the mask hides
    return flops


def trace(
    workload: Workload,
    recipe: Recipe,
    *,
    model: nn.Module | None = None,
    device_type: str = "cuda",
    activations: ActivationSharding = REPLICATED_ACTIVATIONS,
) -> Profile:
    """Trace two steps of few samples each, on fake tensors, or really on the CPU if these fail.

    `model` is the workload's, if it is built already; it stays as it is.  `device_type` chooses the
    kernels, `activations` the activations that tensor parallelism shards.
    Raises the errors that the model or its loss raises in a real step.
    """
    if recipe.weights != "fp32":  # the step with cast parameters is traced anyway
        of_fp32 = recipe.model_copy(update={"weights": "fp32"})
        profile = trace(
            workload, of_fp32, model=model, device_type=device_type, activations=activations
        )
        return with_optimizer(profile, recipe.optimizer, device_type, recipe.weights)
    if model is None and workload.equal_blocks:
        model = build_on_meta(workload)
    traced = partial(_profile, workload, recipe, device_type, activations, built=model)
    with preserved_generators():
        profile = traced(None)
        if recipe.precision == "fp32":
            return profile
        try:
            with _quiet():
                native = traced(AUTOCAST_DTYPES[recipe.precision])
        except Exception as error:  # strategies that cast parameters refuse this model
            logger.info("the model does not compute with 16-bit parameters: %s", error)
            return profile
    return replace(profile, native=native)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from printing the traceback of an operation that fake tensors refuse, and what
    its kernels for this machine warn of."""
    torch_logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, torch_logger.disabled = torch_logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\.")
            yield
    finally:
        torch_logger.disabled = before


def _profile(
    workload: Workload,
    recipe: Recipe,
    device_type: str,
    activations: ActivationSharding,
    casts: torch.dtype | None,
    *,
    built: nn.Module | None,
) -> Profile:
    """Profile the model under autocast, or with its parameters cast to a type."""
    sizes = [min(count, workload.training_samples) for count in SAMPLES]
    every_nth = recipe.activation_checkpointing not in (False, True, "selective")
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    trace_steps = partial(
        _steps,
        workload,
        recipe,
        sizes,
        device_type=device_type,
        activations=activations,
        casts=casts,
    )
    try:
        try:
            with _quiet():
                shortened = built if workload.equal_blocks and not every_nth else None
                full, first, second = trace_steps(fake=fake, shortened=shortened)
        except UnequalLayers as error:
            logger.info("all layers are traced, since two differ: %s", error)
            with _quiet():
                full, first, second = trace_steps(fake=fake)
    except Exception as error:  # its shapes depend on values, for example
        logger.info("traced by real steps, since fake tensors cannot: %s", error)
        try:
            sizes[:] = [min(count, workload.training_samples) for count in REAL_SAMPLES]
            full, first, second = trace_steps(fake=None)
        except ValueError:  # a batch norm refuses a single value
            sizes[:] = [min(count, workload.training_samples) for count in SAMPLES]
            full, first, second = trace_steps(fake=None)
    names, second_names = ([unit.name for unit in step.units] for step in (first, second))
    if names != second_names:
        name = next(a or b for a, b in zip_longest(names, second_names) if a != b)
        message = f"two steps with the same seed use different parts of it: {name}"
        raise InputError("the model", message, "draw from torch's, numpy's or random's generators")
    line = _Line(*sizes)
    units = tuple(_unit(a, b, line) for a, b in zip(first.units, second.units, strict=True))
    profile = Profile(
        units=units,
        size=ModelSize(
            parameters=sum(unit.parameters for unit in units),
            trained_parameters=sum(unit.trained_parameters for unit in units),
            trained_matrices=matrix_shapes(shape for shape, _ in full.trained_shapes),
            frozen_element_bytes=_mean_of_frozen(units),
            mixed_parameters=_mixed_parameters(units),
            units=max(
                1, len({unit.name if unit.block else "" for unit in units if unit.parameters})
            ),
        ),
        buffer_bytes=full.buffer_bytes,
        batch_bytes=line(first.batch_bytes, second.batch_bytes),
        trained_shapes=tuple((*key, count) for key, count in Counter(full.trained_shapes).items()),
        unused=tuple(dict.fromkeys(first.block_names) - dict.fromkeys(names).keys()),
        limited=full.limited,
    )
    return with_optimizer(profile, recipe.optimizer, device_type)


def _steps(
    workload: Workload,
    recipe: Recipe,
    sizes: Sequence[int],
    *,
    device_type: str,
    activations: ActivationSharding,
    casts: torch.dtype | None,
    fake: FakeTensorMode | None,
    shortened: nn.Module | None = None,
) -> tuple[_FullModel, _StepTrace, _StepTrace]:
    """Trace a step of each size, of a new model or of the first and last layers of one."""
    # The update is measured apart from the step.
    eager = recipe.model_copy(update={"compile": "none", "optimizer": Optimizer()})
    model = shortened or (build_on_meta(workload) if fake else None) or workload.build_model()
    hidden = {*hidden_matrices(model, workload.blocks(model))}
    full = _FullModel(
        trained_shapes=[
            (tuple(p.shape), p in hidden) for p in model.parameters() if p.requires_grad
        ],
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        limited=tuple(limited_heads(model)),
    )
    repetitions: list[Repetition] = []
    if shortened is not None:
        model, repetitions = shortened_copy(model, workload.blocks(model))
    for parameter in model.parameters():  # which may be cast below
        setattr(parameter, ELEMENT_BYTES, stored_element_bytes(parameter))
    plan = workload.tensor_plan(model)  # it refers to the names of modules before they are wrapped
    styled = [*styled_modules(model, plan).values()] if isinstance(plan, TensorPlan) else None
    prepare(model, workload, eager)
    blocks = sharding_units(model, "blocks", workload.blocks(model))
    if fake is not None:
        _make_fake(model, fake, casts)
    if casts is not None:
        for parameter in () if fake else model.parameters():
            parameter.data = parameter.data.to(casts)
        for unit in (*blocks, model):
            cast_inputs(unit, casts)
        allow_mixed_dtype_batch_norm(model)
        widen_outputs(model)
    steps = []
    for size in sizes:
        batch_plan = BatchPlan(global_batch=size, seed=recipe.seed)
        batch = next(iter(workload.batches(batch_plan, Shard(index=0, count=1)))).to(CPU)
        if fake is not None:
            batch = with_tensors(batch, fake.from_tensor)
        sharding = None if styled is None else TensorSharding(styled, activations)
        step = _StepTrace(model, blocks, batch, recipe, device_type=device_type, sharding=sharding)
        kernels = _gpu_kernels() if device_type == "cuda" and fake else nullcontext()
        seed_generators(recipe.seed)  # a model that skips layers by chance skips the same ones
        limits = _unpacked() if fake else at_their_limits(model)
        with fake or nullcontext(), kernels, limits, step:
            with nullcontext() if casts else autocast(recipe, CPU):
                loss = workload.loss(model, batch)
                share = share_of_step(loss, batch.step_weight, 1)
            del loss
            step.backward(share)
        step.assign_rest(model)
        model.zero_grad(set_to_none=True)
        for repetition in repetitions:
            step.units = expand(step.units, repetition)
        steps.append(step)
    return full, steps[0], steps[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _FullModel:
    """Sizes of the model before layers were removed."""

    trained_shapes: Sequence[tuple[tuple[int, ...], bool]]
    """Shape of each trained parameter, and whether it is a matrix of a block."""
    buffer_bytes: int
    limited: tuple[str, ...]


@contextmanager
def _unpacked() -> Iterator[None]:
    """Keep transformers from masking attention for samples that could be packed.

    On fake tensors it cannot look; in a real step it finds one sample and uses causal kernels.
    Packed documents have a mask of their own.
    """
    module = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    original = getattr(module, name, None)
    if original is not None:
        setattr(module, name, lambda *_, **__: None)
    try:
        yield
    finally:
        if original is not None:
            setattr(module, name, original)


@contextmanager
def _gpu_kernels() -> Iterator[None]:
    """Trace attention as one fused kernel, and dropout with masks of one byte for each value.

    A CPU's kernels decompose the first, and save factors for the second.
    """
    attention, dropout = functional.scaled_dot_product_attention, functional.dropout

    def fused(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,  # noqa: ARG001
        *causal: bool,
        **others: Any,
    ) -> Tensor:
        return attention(query, key, value, attn_mask, 0.0, *causal, **others)

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
    """Replace parameters and buffers, in place, by fake tensors; tied ones stay tied."""
    fakes: dict[int, Any] = {}

    def converted(tensor: Tensor) -> Any:
        if id(tensor) not in fakes:
            is_cast = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
            dtype = casts if casts is not None and is_cast else tensor.dtype
            with fake:
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
            trained = tensor.requires_grad
            fakes[id(tensor)] = (
                nn.Parameter(empty, requires_grad=trained)
                if isinstance(tensor, nn.Parameter)
                else empty
            )
            setattr(fakes[id(tensor)], ELEMENT_BYTES, stored_element_bytes(tensor))
        return fakes[id(tensor)]

    originals = [*model.parameters(), *model.buffers()]  # alive, so that no other gets their id
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = converted(tensor)
    del originals


def vars_of(batch: Batch) -> list[Any]:
    return [getattr(batch, name) for name in batch.__dataclass_fields__]  # type: ignore[attr-defined]


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors that have a storage: of a sparse one its indices and values."""
    leaves = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    dense = ([t._indices(), t._values()] if t.is_sparse else [t] for t in leaves)
    return [tensor for of_leaf in dense for tensor in of_leaf]


@dataclass(frozen=True, slots=True)
class _Line:
    """The line through a total at two numbers of samples."""

    first_samples: int
    second_samples: int

    def __call__(self, first: Total, second: Total) -> Amount:
        slope = self._slope(first.total, second.total)
        return Amount(
            fixed=first.total - slope * self.first_samples,
            per_sample=slope,
            replicated_fraction=second.replicated / second.total if second.total else 0.0,
        )

    def values(self, first: Moments, second: Moments) -> Moments:
        """Return the numbers of the amounts for many totals, each with its replicated part."""
        (one, _), (other, replicated) = first.T, second.T
        slope = self._slope(one, other)
        share = np.divide(replicated, other, out=np.zeros_like(other), where=other != 0)
        return np.column_stack([one - slope * self.first_samples, slope, share])

    def _slope(self, one: Any, other: Any) -> Any:
        more = self.second_samples - self.first_samples
        return (other - one) / more if more else one / self.first_samples


def _unit(first: UnitTrace, second: UnitTrace, line: _Line) -> Unit:
    trained = [parameter for parameter in first.parameters if parameter.requires_grad]
    return Unit(
        name=first.name,
        parameters=sum(p.numel() for p in first.parameters),
        trained_parameters=sum(p.numel() for p in trained),
        frozen_element_bytes=frozen_element_bytes(first.parameters),
        replicated_fraction=first.replicated_fraction,
        gradient_bytes=first.gradient_bytes,
        sizes=tuple(p.numel() for p in trained),
        block=first.block,
        forward=_operations(first, second, "forward", line),
        repeated=_operations(first, second, "repeated", line),
        backward=_operations(first, second, "backward", line),
        begun_bytes=line(first.begun_bytes, second.begun_bytes),
        entered_bytes=line(first.entered_bytes, second.entered_bytes),
        reduced_bytes=line(first.reduced_bytes, second.reduced_bytes),
        saved_bytes=line(first.saved_bytes, second.saved_bytes),
        forward_moments=_moments(first, second, "forward", line),
        backward_moments=_moments(first, second, "backward", line),
        gradient_moments=_moments(first, second, "gradient", line),
    )


def _mean_of_frozen(units: Iterable[Unit]) -> float:
    """Return the mean bytes of an element of all frozen parameters."""
    counts = [(unit.parameters - unit.trained_parameters, unit) for unit in units]
    stored = sum(count * unit.frozen_element_bytes for count, unit in counts)
    frozen = sum(count for count, _ in counts)
    return stored / frozen if frozen else FROZEN_ELEMENT_BYTES


def _mixed_parameters(units: Iterable[Unit]) -> int:
    """Return the number of parameters in gathered units with any trained parameter.

    Layers between blocks are one unit.
    """
    gathered: dict[str, list[Unit]] = defaultdict(list)
    for unit in units:
        gathered[unit.name if unit.block else ""].append(unit)
    mixed = (part for part in gathered.values() if any(unit.trained_parameters for unit in part))
    return sum(unit.parameters for part in mixed for unit in part)


def _operations(
    first: UnitTrace, second: UnitTrace, in_pass: Pass, line: _Line
) -> tuple[Operation, ...]:
    """Return the operations of a pass; those with the same numbers are one, with their sums.

    If the two steps ran unlike operations, those of a kind are one.
    """
    works = [step.operations[in_pass] for step in (first, second)]
    if [work.kind for work in works[0]] != [work.kind for work in works[1]]:
        works = [_sums(of_step) for of_step in works]
    counts = Counter(
        (b.kind, line(a.flops, b.flops), line(a.bytes, b.bytes), b.calls)
        for a, b in zip(*works, strict=True)
    )
    return tuple(
        Operation(
            kind=kind, flops=flops.times(count), bytes=moved.times(count), calls=count * calls
        )
        for (kind, flops, moved, calls), count in counts.items()
    )


def _sums(works: Iterable[Work]) -> list[Work]:
    """Return one record for each kind that a trace has: `in_fp8` makes products in 8 bits."""
    sums = {kind: Work(kind, calls=0) for kind in get_args(Kind) if kind != "fp8_product"}
    for work in works:
        total = sums[work.kind]
        total.flops = total.flops.plus(*work.flops)
        total.bytes = total.bytes.plus(*work.bytes)
        total.calls += work.calls
    return [*sums.values()]


def _moments(first: UnitTrace, second: UnitTrace, in_pass: Pass, line: _Line) -> tuple[Moment, ...]:
    """Return the moments that can have the most live bytes at some number of samples.

    If the two steps ran unlike numbers of operations, it is the largest moment of each.
    """
    one, other = (step.moment_arrays.get(in_pass, np.zeros((0, 3))) for step in (first, second))
    if len(one) != len(other):
        one, other = (
            np.array([max(a.tolist() or b.tolist())]) for a, b in ((one, other), (other, one))
        )
    points = np.column_stack([line.values(one[:, :2], other[:, :2]), other[:, 2]])
    moments = (points[at].tolist() for at in _largest(points))
    return tuple(
        Moment(
            bytes=Amount(fixed=fixed, per_sample=per_sample, replicated_fraction=replicated),
            gradient_bytes=gradients,
        )
        for fixed, per_sample, replicated, gradients in moments
    )


def _largest(points: Moments) -> list[int]:
    """Return the positions of the points that no other point exceeds or equals in every number."""
    left, positions = points, np.arange(len(points))
    front = []
    while len(left):
        at = left.sum(axis=1).argmax()  # nothing exceeds it
        front.append(int(positions[at]))
        larger = (left > left[at]).any(axis=1)
        left, positions = left[larger], positions[larger]
    return sorted(front)


def with_optimizer(
    profile: Profile, spec: Optimizer, device_type: str, weights: Weights = "fp32"
) -> Profile:
    """Return the profile of a model that is trained by another optimizer, or in another type."""
    native = profile.native and with_optimizer(profile.native, spec, device_type, weights)
    dtype = torch.bfloat16 if weights == "bf16" else torch.float32
    update = _update_values(profile.trained_shapes, spec, device_type, dtype)
    return replace(profile, **update, native=native)


class _Accesses(_LiveBytes):  # type: ignore[no-untyped-call]  # torch's
    """Counts the tensors of a number of elements that operations read and write."""

    def __init__(self, elements: int, uncounted: Iterable[Tensor]) -> None:
        super().__init__(uncounted)
        self._elements = elements
        self.count = 0

    def after_operation(self, function: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        if function.is_view:
            return
        named = zip(function._schema.arguments, args, strict=False)
        changed = [value for argument, value in named if argument.is_write]
        for tensors in ((args, kwargs), (changed, outputs)):
            stored = {storage_key(t) for t in _tensors(tensors) if t.numel() == self._elements}
            self.count += len(stored)


def _update_values(
    shapes: Iterable[tuple[tuple[int, ...], bool, int]],
    spec: Optimizer,
    device_type: str,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Return the fields of a profile about an update of parameters of these shapes and the type.

    An optimizer is measured on small tensors: its state by the number of axes, since some store
    sums of rows and columns, and the rest on a matrix, as nearly all parameters are.
    """
    sized = [(shape, spec.name == "muon" and hidden, count) for shape, hidden, count in shapes]
    if spec.name == "muon":
        check_hidden_matrices(hidden for _, hidden, _ in sized if hidden)
    total = sum(count * prod(shape) for shape, _, count in sized)
    if not total:
        return {}
    if spec.state_bits == 8:
        in_8_bits = sum(count * bytes_in_8_bits(prod(shape)) for shape, _, count in sized)
        return {
            "state_values": in_8_bits / (FP32_BYTES * total),
            "update_values": 0.0,  # one kernel
            "update_accesses": None,
            "updates_together": False,
            "update_products": _orthogonalised(sized),
        }
    chooses = spec.implementation == "default" and "implementation" in spec.KEYS[spec.name]
    if device_type == "cuda" and chooses:
        spec = spec.model_copy(update={"implementation": "foreach"})  # torch's choice on CUDA
    kinds = {(len(shape), hidden) for shape, hidden, _ in sized}
    stored = {kind: _State(spec, *kind, dtype) for kind in kinds}
    state = sum(
        count * stored[len(shape), hidden].stored_bytes(shape) for shape, hidden, count in sized
    )
    live = accesses = 0.0
    any_together = False
    for hidden in {hidden for _, hidden in kinds}:
        sizes = [(prod(shape), count) for shape, group, count in sized if group == hidden]
        elements = sum(size * count for size, count in sizes)
        temporary, accesses_of_each, together = _measured_update(spec, hidden, dtype)
        live = max(live, temporary * (elements if together else max(sizes)[0]))
        accesses += accesses_of_each * elements
        any_together |= together
    return {
        "state_values": state / (FP32_BYTES * total),
        "update_values": live / (total if any_together else max(prod(s) for s, *_ in sized)),
        "update_accesses": accesses / total,
        "updates_together": any_together,
        "update_products": _orthogonalised(sized),
    }


def _orthogonalised(shapes: Iterable[tuple[tuple[int, ...], bool, int]]) -> Operation:
    """Return the products of the Newton-Schulz iterations of `torch.optim.Muon`."""
    iterations, flops, calls = 5, 0.0, 0
    for shape, hidden, count in shapes:
        if hidden:
            short, long = sorted(shape)
            # X X^T, its square, and the sum of both times X.
            flops += count * iterations * 2 * (2 * short * short * long + short**3)
            calls += count * iterations * 3
    return Operation(kind="product", flops=Amount(fixed=flops), calls=calls)


def bytes_in_8_bits(elements: int) -> int:
    """Bytes of both averages of a parameter in AdamW of 8 bits.

    Source: bitsandbytes, `optim/optimizer.py`: small tensors in fp32; others with a scale in fp32
    for each block of 256 values (2048 in old versions).
    """
    if elements < 4096:
        return 2 * FP32_BYTES * elements
    return 2 * (elements + FP32_BYTES * ceil(elements / 256))


def _stepped(
    spec: Optimizer, shape: tuple[int, ...], hidden: bool, count: int, dtype: torch.dtype
) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Return parameters and their optimizer after its first step."""
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for _ in range(count)]
    optimizer = create_optimizer([{"params": parameters, HIDDEN_MATRIX: hidden}], spec)
    for parameter in parameters:
        parameter.grad = torch.ones(shape, dtype=dtype)
    optimizer.step()
    return parameters, optimizer


class _State:
    """State of an optimizer for parameters with so many axes."""

    def __init__(self, spec: Optimizer, axes: int, hidden: bool, dtype: torch.dtype) -> None:
        bits = ELEMENTS.bit_length() - 1
        self._shape = tuple(2 ** (bits // axes + (at < bits % axes)) for at in range(axes))
        stored = _tensors(dict(_stepped(spec, self._shape, hidden, 1, dtype)[1].state))
        self._tensors = [tensor for tensor in stored if tensor.numel()]

    def stored_bytes(self, shape: tuple[int, ...]) -> float:
        """Bytes for a parameter of this shape, without counters and tables."""
        return sum(
            tensor.nbytes / tensor.numel() * self._elements(tensor, shape)
            for tensor in self._tensors
        )

    def _elements(self, tensor: Tensor, shape: tuple[int, ...]) -> int:
        axes = [*zip(tensor.shape, self._shape, shape, strict=False)]
        if tensor.ndim == len(shape) and all(size in (1, full) for size, full, _ in axes):
            return prod(1 if size == 1 else elements for size, _, elements in axes)
        return prod(shape) if tensor.numel() == ELEMENTS else 0


def _measured_update(
    spec: Optimizer, hidden: bool, dtype: torch.dtype
) -> tuple[float, float, bool]:
    """Measure an optimizer step on small matrices.

    Returns temporary values for each element, reads and writes of each element, both in values of
    32 bits, and whether all parameters are updated together.
    """
    peaks = []
    for count in (1, 2, 3):
        parameters, optimizer = _stepped(spec, (64, ELEMENTS // 64), hidden, count, dtype)
        gradients = [p.grad for p in parameters if p.grad is not None]
        averages = [t for t in _tensors(dict(optimizer.state)) if t.numel() == ELEMENTS]
        live = _Accesses(ELEMENTS, (*parameters, *gradients, *averages))
        with live:
            optimizer.step()
        peaks.append(live.peak / (FP32_BYTES * ELEMENTS))
    # Not the second peak over the first: a loop over parameters holds a temporary of the last one.
    accesses = live.count / count * dtype.itemsize / FP32_BYTES
    return peaks[0], accesses, peaks[2] > 1.25 * peaks[1]
