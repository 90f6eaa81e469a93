"""Records the memory and the operations of a step of a model, unit by unit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only  # torch has no public one
from torch.utils.flop_counter import flop_registry, shape_wrapper

from shardmark.base.recipe import Recipe
from shardmark.predict.profile import Kind
from shardmark.predict.trace.chains import Chains
from shardmark.predict.trace.live_bytes import LiveBytes, tensors_of
from shardmark.predict.trace.tensor_sharding import TensorSharding, storage_key
from shardmark.predict.trace.unit_trace import Pass, TracedUnits, UnitTrace
from shardmark.ranks.strategies.blocks import checkpointed_blocks
from shardmark.ranks.workloads.base import Batch
from shardmark.ranks.workloads.flops import UNKNOWN_TO_TORCH

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle


aten = torch.ops.aten
WINDOW: ContextVar[int | None] = ContextVar("window", default=None)
"""Number of keys that each query of the attention that runs now sees; None for all."""
FLOPS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    **{operator: shape_wrapper(formula) for operator, formula in UNKNOWN_TO_TORCH.items()},  # type: ignore[no-untyped-call]
}
MOST_FLOPS = 10**8
"""Largest product or convolution that a trace on real tensors computes."""
CONVOLUTIONS = {aten.convolution: 1, aten.convolution_backward: 2}
"""Position of the weight among the arguments, behind the input."""
AFTER_WEIGHT = (2, 4, 7)
"""Positions of strides, dilations and groups behind the weight."""


def computes_nothing(function: Any, read: Sequence[Tensor], written: Sequence[Tensor]) -> bool:
    """True for a view, and for an operator that returns its inputs, such as `_unsafe_view`."""
    if function.is_view:
        return True
    inputs = {storage_key(tensor) for tensor in read}
    return not function._schema.is_mutable and all(storage_key(t) in inputs for t in written)


def workspace_bytes(packet: Any, args: Any, device_type: str) -> int:
    """Bytes that the kernel allocates internally, which torch does not see."""
    if device_type == "cpu" and packet in CONVOLUTIONS:
        weight: Tensor = args[CONVOLUTIONS[packet]]
        return weight.nbytes  # a copy in oneDNN's format
    return 0


def kind_of(packet: Any, args: Any) -> Kind:
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


def flops_of(
    function: Any, args: Any, kwargs: Any, outputs: Any, *, window: int | None = None
) -> int:
    """FLOPs of an operation; attention computes a `window` of keys for each query."""
    packet = function.overloadpacket
    if packet not in FLOPS:
        return sum(tensor.numel() for tensor in tensors_of(outputs))
    flops = FLOPS[packet](*args, **kwargs, out_val=outputs)
    names = [argument.name for argument in function._schema.arguments]
    causal = False
    if "is_causal" in names:
        at = names.index("is_causal")
        causal = args[at] if at < len(args) else kwargs.get("is_causal", False)
    if not (causal or window):
        return flops
    # Kernels skip what the mask hides.
    length: int = args[0].shape[-2]
    reach = min(window or length, length)
    pairs = reach * length - reach**2 / 2 if causal else (2 * reach + 1) * length - reach**2
    return round(flops * min(1.0, pairs / length**2))


class CompiledCode:
    """Blocks that are compiled, or the full model: a compiler saves few of their results.

    It saves the results of products, and computes the others again in the backward pass.
    """

    def __init__(self, scope: str, live: LiveBytes) -> None:
        """`scope` is the recipe's `compile`; `live` counts the bytes of the step."""
        self._scope = scope
        self._live = live
        self._nodes: list[int] = []
        """Numbers of the autograd nodes at which a compiled model begins and ends."""
        self.recomputed: dict[int, int] = {}
        """Bytes, by storage, of results that are computed again instead of being saved."""
        self.saved_outputs: dict[int, list[Tensor]] = defaultdict(list)
        """Outputs of products, by the unit's position, from which the rest is computed again."""

    def note_node(self, *_: object) -> None:
        """Note the place in the forward pass where a compiled model begins or ends."""
        self._nodes.append(torch._C._autograd._get_sequence_nr())

    def includes(self, unit: UnitTrace, node: int, *, in_backward: bool) -> bool:
        """True for an operation of compiled code; `node` is that of the backward pass, or -1."""
        if self._scope != "model":
            return self._scope == "blocks" and unit.block
        if not in_backward:
            return len(self._nodes) == 1
        return bool(self._nodes) and self._nodes[0] <= node < self._nodes[-1]

    def leave_unsaved(self, results: Iterable[Tensor]) -> None:
        """Count no bytes for results that the backward pass computes again."""
        for tensor in results:
            if size := self._live.recount(storage_key(tensor), 0):
                self.recomputed[storage_key(tensor)] = size

    def save(self, results: Iterable[Tensor]) -> None:
        """Count results that leave compiled code, so that they are tensors in memory."""
        for tensor in results:
            if size := self.recomputed.pop(storage_key(tensor), 0):
                self._live.recount(storage_key(tensor), size)

    def free_outputs_after(self, at: int) -> None:
        """Free what was saved for the backward passes of the units behind a position."""
        for later in [other for other in self.saved_outputs if other > at]:
            del self.saved_outputs[later]


class StepTrace(LiveBytes):  # type: ignore[no-untyped-call]  # torch's
    """Records a forward and a backward pass.

    Hooks of the model's modules tell which unit computes, the dispatch mode which operations run
    and what they hold, and `CompiledCode`, `Chains` and `TensorSharding` what would differ in a
    compiled or in a divided model.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        batch: Batch,
        recipe: Recipe,
        *,
        device_type: str,
        sharding: TensorSharding | None,
        invents: bool = False,
    ) -> None:
        self._sharding = sharding
        self._invents = invents
        self._resizes = invents and hasattr(model, "transform")
        """True for a detector, whose images have other sizes in each step."""
        self._numbers = 0.01 * torch.randn(2**20, generator=torch.Generator().manual_seed(0))
        self._device_type = device_type
        self._repeats_forward = recipe.activation_checkpointing is True
        self._chains = Chains()
        self._windows: dict[int, int] = {}
        """Window of the attention that computed a storage."""
        self._compiled = CompiledCode(recipe.compile, self)
        super().__init__((*model.parameters(), *model.buffers()))
        fields = [getattr(batch, name) for name in batch.__dataclass_fields__]  # type: ignore[attr-defined]
        self.add(tensors_of(fields), replicated=True)
        self.batch_bytes = self._live_before = self.live
        self._traced = TracedUnits(self.live)
        self.units = self._traced.units
        names = {module: name for name, module in model.named_modules()}
        self.block_names = [names[block] for block in blocks]
        checkpointed = checkpointed_blocks(blocks, recipe.activation_checkpointing)
        self._checkpoints = {names[block] for block in checkpointed}
        self._hooks = [*self._hooked(model, names, {*blocks}, recipe.compile)]

    def _hooked(
        self,
        model: nn.Module,
        names: Mapping[nn.Module, str],
        blocks: Collection[nn.Module],
        compiled: str,
    ) -> Iterator[RemovableHandle]:
        for parameter in model.parameters():
            if parameter.requires_grad:
                yield parameter.register_post_accumulate_grad_hook(self._complete_gradient)  # type: ignore[no-untyped-call]
        for module, name in names.items():
            if module in blocks:
                yield module.register_forward_pre_hook(partial(self._enter_block, name))
                leave = partial(self._leave_block, compiled == "blocks")
                yield module.register_forward_hook(leave)
            else:
                yield module.register_forward_pre_hook(
                    lambda module, _: self._traced.assign(module.parameters(recurse=False))
                )
        if compiled == "model":
            yield model.register_forward_pre_hook(self._compiled.note_node)
            yield model.register_forward_hook(self._leave_compiled)

    def _enter_block(self, name: str, module: nn.Module, inputs: object) -> None:
        if not self._traced.in_backward:
            if name in self._checkpoints:  # the block is computed again from its inputs
                self._compiled.save(tensors_of(inputs))
            self._traced.enter(name, self.live, block=True)
            self._traced.assign(module.parameters())

    def _leave_block(self, compiled: bool, _: nn.Module, __: object, outputs: object) -> None:
        if not self._traced.in_backward:
            if compiled:
                self._compiled.save(tensors_of(outputs))
            self._traced.enter(f"after {self.units[-1].name}", self.live, block=False)

    def _leave_compiled(self, _: nn.Module, __: object, outputs: object) -> None:
        self._compiled.note_node()
        self._compiled.save(tensors_of(outputs))

    def backward(self, loss: Tensor) -> None:
        """Run and record the backward pass, then remove the hooks."""
        self._traced.end(self.live)
        self._traced.in_backward = True
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        self._end()

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for unit in self.units:
            unit.collect_moments()

    def list_blocks(self, blocks: Iterable[nn.Module]) -> None:
        """List the units of a step that does not run."""
        for name, block in zip(self.block_names, blocks, strict=True):
            self._enter_block(name, block, ())
        self._end()

    def assign_rest(self, model: nn.Module) -> None:
        """Assign the parameters that no module has used to the first unit."""
        self._traced.assign_rest(model.parameters())
        if self._sharding is not None:
            for unit in self.units:
                unit.replicated_fraction = self._sharding.replicated_fraction(unit.parameters)

    def _complete_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        unit = self._traced.owner(parameter)
        unit.moments["gradient"].append((self.live, unit.gradient_bytes))
        size = sum(map(self.release, tensors_of(parameter.grad)))
        unit.gradient_bytes += size
        unit.reduced_bytes = self.live

    def on_removed(self, storage: int) -> None:
        super().on_removed(storage)
        self._chains.forget(storage)
        self._windows.pop(storage, None)
        self._compiled.recomputed.pop(storage, None)
        if self._sharding is not None:
            self._sharding.forget(storage)

    def before_operation(self) -> None:
        self._live_before = self.live

    def result(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operation computes; of a large product on real tensors, random numbers.

        A CPU takes minutes for a detector's convolutions in 16 bits, which change no shapes.
        """
        is_candidate = self._invents and function.overloadpacket in FLOPS and "out" not in kwargs
        layouts = {value.layout for value in args if isinstance(value, Tensor)}
        if is_candidate and layouts == {torch.strided}:
            empty = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
            outputs = function(*empty[0], **empty[1])
            if flops_of(function, args, kwargs, outputs) > MOST_FLOPS:
                return tree_map_only(Tensor, self._random, outputs)
        return super().result(function, args, kwargs)

    def _random(self, output: Tensor) -> Tensor:
        """Return a tensor like `output` of small numbers that repeat: drawing all takes long."""
        real = torch.empty_strided(output.shape, output.stride(), dtype=output.dtype)
        flat = real.as_strided((real.untyped_storage().nbytes() // real.itemsize,), (1,))
        for part in torch.split(flat, len(self._numbers)):
            part.copy_(self._numbers[: len(part)])
        return real

    def after_operation(self, function: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        node, recomputes = self._traced.go_to_node()
        in_backward, at, unit = self._traced.in_backward, self._traced.at, self._traced.present
        in_pass: Pass = "backward" if in_backward else "forward"
        if in_backward and not unit.moments["backward"]:
            unit.entered_bytes = self._live_before
            self._compiled.free_outputs_after(at)
        packet = function.overloadpacket
        kind = kind_of(packet, args)
        if self._resizes and kind == "convolution_3x3":
            # cuDNN does not look for its fastest algorithm for each size.
            kind = "convolution"
        read, written = tensors_of((args, kwargs)), tensors_of(outputs)
        is_view = computes_nothing(function, read, written)
        message_bytes = 0
        if self._sharding is not None:
            message_bytes, replicated_bytes = self._sharding.follow(
                packet, read, written, backward=in_backward and not recomputes
            )
            self.add_replicated(replicated_bytes)
        compiled = not is_view and self._compiled.includes(unit, node, in_backward=in_backward)
        fused = compiled and kind == "other"
        if fused and (not in_backward or recomputes):
            self._compiled.leave_unsaved(written)
        inputs = set() if fused or is_view else {storage_key(tensor) for tensor in read}
        internal_bytes = workspace_bytes(packet, args, self._device_type)
        internal_bytes += sum(self._compiled.recomputed.get(key, 0) for key in inputs)
        live = self.live.plus(internal_bytes, message_bytes)
        unit.moments[in_pass].append((live, unit.gradient_bytes))
        if is_view or (recomputes and self._repeats_forward):
            return
        if compiled and not (fused or in_backward) and unit.name not in self._checkpoints:
            self._compiled.saved_outputs[at] += written
        operations = unit.operations["repeated" if recomputes else in_pass]
        work = self._chains.work(operations, kind, fused=fused)
        window = self._window(read, written) if kind == "attention" else None
        flops, is_replicated = flops_of(function, args, kwargs, outputs, window=window), True
        again = self._compiled.recomputed if in_backward else ()
        for tensor, count in self._chains.moved(work, read, written, fused=fused, again=again):
            replicated = self._sharding is not None and not self._sharding.is_sharded(tensor)
            is_replicated = is_replicated and replicated
            work.bytes = work.bytes.plus(count, count if replicated else 0.0)
        work.flops = work.flops.plus(flops, flops if is_replicated else 0.0)

    def _window(self, read: Sequence[Tensor], written: Sequence[Tensor]) -> int | None:
        """Window of attention, which the backward pass knows by the results that it reads."""
        keys = (storage_key(tensor) for tensor in read)
        window = WINDOW.get() or next((self._windows[k] for k in keys if k in self._windows), None)
        if window is not None:
            self._windows |= {storage_key(tensor): window for tensor in written}
        return window
