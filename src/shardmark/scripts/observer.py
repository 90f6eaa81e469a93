"""Observer of a process of an audited script: records its first optimizer steps."""

from __future__ import annotations

import atexit
import gc
import math
import os
import pickle
import random
import shutil
import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree  # torch has no public one
from torch import Tensor, is_tensor, nn
from torch.func import debug_unwrap
from torch.nn.modules.batchnorm import _BatchNorm

from shardmark.scripts import hooks
from shardmark.scripts.batches import checksum, copied, leaves, mean_checksum, row_checksums
from shardmark.scripts.draws import Flow, user_place
from shardmark.scripts.full_tensors import (
    REPLICA,
    flat_slices,
    frameworks_of,
    full_copies,
    full_copy,
    full_parameters,
    gradients_of,
    is_a,
    is_distributed_tensor,
    local_norms,
    plain_name,
    reducing_ranks,
    sampled,
    sampling_of,
)
from shardmark.scripts.interventions.base import NAMES
from shardmark.scripts.loaders import Order, described
from shardmark.scripts.record import (
    BATCHES,
    GRAPH,
    START,
    Clip,
    Draw,
    Forward,
    Loader,
    LossCall,
    Micro,
    OptimizerFacts,
    Record,
    Step,
    Term,
    save,
)
from shardmark.scripts.recording import Plan, rank_file

MOST_DRAWN_BYTES = 2**29
"""Draws beyond this size are not recorded: data that a script makes, and needs no replay."""
LIBRARIES_OF_LOADERS = ("accelerate", "torch", "shardmark")
"""Packages that ask for the length of a loader on their own."""
NO_EXCHANGES = ("torch.utils.checkpoint", "torch.nn.modules._functions")
"""Modules of functions with their own gradients that do not exchange results of samples."""
GATHERS = ("all_gather", "all_gather_into_tensor", "all_gather_object")
MOST_ORDERS = 8
"""Iterations over loaders whose indices are recorded."""
DENSE = {Tensor, nn.Parameter}
TOTALS = ("total_iters", "T_max", "total_steps")
"""Attributes of torch's schedules that hold the number of steps after which they end."""
MOST_STEPS = 5
"""Steps that are recorded of all optimizers, in units of those that are asked for: one optimizer of
several may step less often than another."""
LINEAR = {*NAMES["linear_functions"]}
"""Torch's functions that give K times as much for K times as large elements, constants apart."""
SERVERS = {"sglang", "vllm"}
"""Packages that generate samples where no hook sees it."""
LONGEST_WAIT_SECONDS = 30.0
"""Time that a rank waits for the others before it ends."""


class Observer:
    """Records what the hooks see, and ends the process after the last step."""

    skips = False
    """True while the steps of an epoch are skipped: they are not recorded."""
    skipped_by_ranks: int | None = None
    """Number of windows that a replay skips."""
    _generators = b""
    """States of Python's and numpy's generators at the first forward pass."""
    _passes_compiled = False
    """True in a forward pass with gradients of a compiled model, whose code computes without."""
    loss_of_engine: Any = None
    """The loss that the script gives DeepSpeed's engine."""
    engine: type | None = None
    """The class of DeepSpeed's engine that is watched."""
    _depth_of_buffers = 0
    """Depth of the call for which the model's buffers were copied in this step."""
    _ends: Sequence[End] = ()
    """Ends of the graph of the loss that `backward` was called on last."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.record = Record(rank=0, ranks=1)
        self.optimizers: list[weakref.ref[Any]] = []
        self.scale, self.unscaled = 1.0, False
        self._batches: list[list[Any]] = []
        self._orders: list[Order] = []
        self._order = Order(Loader(batch_size=None))
        """Order of the loader that loads its next batch."""
        self._roots: list[nn.Module] = []
        self._stack: list[nn.Module] = []
        self._outputs: list[Tensor] = []
        """Outputs of the outermost modules since the last backward pass."""
        self.in_backward = False
        self._hooked: dict[int, Tensor] = {}
        self._local: dict[tuple[int, str], Tensor] = {}
        self._places: dict[tuple[int, str], nn.Module] = {}
        self._module_names: dict[int, str] = {}
        self._with_state: set[int] = set()
        """Optimizers that had a state after their last step."""
        self._micro = Micro()
        self._locals_of_micros: list[dict[tuple[int, str], Tensor]] = []
        self._step = Step()
        self._in_step: Any = None
        self._stepping: list[weakref.ref[Any]] = []
        """Optimizers that take steps."""
        self._parts: list[set[int]] = []
        """Optimizers that step after the same backward passes."""
        self._last_steps: dict[int, Step] = {}
        """Last step of each optimizer."""
        self._slices: list[slice] = []
        """Each optimizer's part of the parameters."""
        self._stepped: set[int] = set()
        """Optimizers that have taken this step."""
        self._settings: dict[int, list[dict[str, float]]] = {}
        self._parameters: list[Tensor] = []
        self._start: list[Tensor] = []
        """Full parameters before the first step, of a rank whose values a replay starts from."""
        self._initial: dict[int, float] = {}
        """Checksums of parameters before the first forward pass of their model, by id."""
        self._unowned: dict[int, tuple[str, Tensor, float]] = {}
        """Name, tensor and checksum of parameters with a gradient that no optimizer has, by id."""
        self.flow = Flow()
        self._followed: defaultdict[str, dict[int, dict[str, Tensor]]] = defaultdict(dict)
        self._process, self._written = os.getpid(), False
        self._clipped: list[dict[int, Tensor | None]] = []
        self._drawn_bytes, self._busy = 0, False
        atexit.register(self.write)
        if plan.deterministic:
            _seed()
        self._seed_at_start = torch.initial_seed()

    # Forward passes

    def before_module(self, module: nn.Module) -> None:
        if self.in_backward or self._busy:
            return
        outermost = not self._stack
        self._stack.append(module)
        if outermost and not _has_parameters(module) and next(module.buffers(), None) is not None:
            name = self.flow.name_of(module)
            buffers = {f"{name}.{n}": v for n, v in _buffers(module).items()}
            number = len(self.record.steps) + bool(self._stepped)  # the step before may be open
            self._followed[name].setdefault(number, buffers)
            parts = (
                part
                for part in module.modules()
                if not (isinstance(part, _BatchNorm) and part.training)  # it does not read them
            )
            self.flow.add([b for part in parts for b in part.buffers(recurse=False)], {name})
        if outermost:
            self._passes_compiled = torch.is_grad_enabled() and "compile" in self.plan.interventions
        if not torch.is_grad_enabled():
            return
        if outermost:
            self._end_step()
        if outermost and _has_parameters(module):
            self.before_root(module)
        depth = len(self._stack[:2])  # a script may call the model inside of a DDP, too
        # Buffers are as the pass uses them: DDP copies rank 0's when its own call begins.
        copies = is_a(self._stack[-depth], REPLICA)
        unchanged = copies if depth > 1 else _has_parameters(module) and not copies
        if self._depth_of_buffers < depth and unchanged:
            replicas = [m for m in module.modules() if m is not module and is_a(m, REPLICA)]
            self._step.buffers |= _buffers(module, without=replicas)
            if not replicas and next(module.buffers(), None) is not None:
                self._depth_of_buffers = depth

    def before_root(self, module: nn.Module) -> None:
        """Called before every forward pass of an outermost module that computes gradients."""
        if all(module is not root for root in self._roots):
            if not self._roots:
                self._choose_sampling(module)
                self._generators = _generators()
            self._roots.append(module)
            names = (*self.record.frameworks, *frameworks_of(module))
            self.record.frameworks = list(dict.fromkeys(names))
            hooks.watch_deepspeed(self, module)
            for inner in module.modules() if self.plan.deterministic else ():
                if is_a(inner, "_DropoutNd"):
                    inner.p = 0.0  # type: ignore[assignment]
                elif isinstance(getattr(inner, "dropout", None), float):
                    inner.dropout = 0.0  # type: ignore[assignment]
            self.record.dropout |= _dropout(module)
            trained = [p for p in module.parameters() if p.requires_grad]
            dense = [p for p in trained if not is_distributed_tensor(p)]
            self._initial |= {id(p): checksum(full_copy(p)) for p in dense}
            self._module_names |= {id(m): plain_name(name) for name, m in module.named_modules()}
        for name, parameter in module.named_parameters():
            owner, _, leaf = name.rpartition(".")
            if (
                parameter.requires_grad
                and parameter.is_leaf
                and not is_distributed_tensor(parameter)
            ):
                self._watch_gradient(module.get_submodule(owner), leaf, parameter)

    def _choose_sampling(self, module: nn.Module) -> None:
        """Choose the elements of a large model that are recorded, and refuse what has no room."""
        _, ranks = _place()
        elements = sum(p.numel() for p in module.parameters() if p.requires_grad)
        if "FSDP1" not in frameworks_of(module):  # its slices of flat parameters are not sampled
            self.record.every = sampling_of(elements)
        recorded_bytes = 4 * elements * (1 + ranks * (3 * self.plan.steps + 4) / self.record.every)
        available_bytes = math.inf
        with suppress(OSError, IndexError):
            memory = Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()
            available_bytes = int(memory[0]) * 1024
        for place, free_bytes in (
            (f"on the disk of {self.plan.directory}", shutil.disk_usage(self.plan.directory).free),
            ("of memory", available_bytes),
        ):
            if recorded_bytes > free_bytes:
                self.record.refusal = (
                    f"the records of {ranks} ranks take {recorded_bytes / 2**30:.3g} GiB, and "
                    f"{free_bytes / 2**30:.3g} GiB are free {place}; set TMPDIR to a folder with "
                    "room, or audit fewer ranks"
                )

    def after_module(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self.in_backward or self._busy or not self._stack:
            return
        self._stack.pop()
        if isinstance(module, _BatchNorm) and module.training and not is_a(module, "SyncBatchNorm"):
            with self._recording(), suppress(RuntimeError):
                means = [(len(value), mean_checksum(value)) for value in leaves(inputs)[:1]]
                self.record.batch_norm.setdefault(self.place_of(module), []).extend(means)
        if not torch.is_grad_enabled():
            return
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad:
                continue
            if is_distributed_tensor(parameter):
                self.record.refusal = (
                    f"the weights of {type(module).__name__} stay divided in the forward pass "
                    "(tensor parallel): a rank has no gradient of its own to compare"
                )
            elif parameter.is_leaf:
                self._watch_gradient(module, name, parameter)
        if is_a(module, REPLICA):  # its forward pass decides
            self._micro.synchronised = bool(module.require_backward_grad_sync)
        if not self.record.steps and module._parameters:
            self._sum_squares(module, inputs, outputs)
        if isinstance(outputs, Tensor) and outputs.is_floating_point():
            in_32 = outputs.is_cuda and outputs.dtype == torch.float32
            tf32 = in_32 and torch.backends.cuda.matmul.allow_tf32
            error = 2.0**-11 if tf32 else torch.finfo(outputs.dtype).eps
            self.record.epsilon = max(self.record.epsilon, error)
        if not self._stack and any(module is root for root in self._roots):
            self.after_root(module, inputs, outputs)

    def place_of(self, module: nn.Module) -> tuple[str, bool, int, int]:
        """Name of a module, a flag for gradients, and the step and the micro-batch of its call."""
        name, position = self._module_names.get(id(module), ""), len(self._step.micros)
        return name, torch.is_grad_enabled(), len(self.record.steps), position

    def _sum_squares(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        sums = self.record.calls.setdefault(self._module_names.get(id(module), ""), [0.0, 0.0, 0.0])
        for number, values in enumerate((inputs, outputs)):
            with self._recording(), suppress(RuntimeError):
                for tensor in leaves(values)[:1]:
                    sums[2] += tensor.numel() * (number == 0)
                    if 8 * tensor.numel() <= MOST_DRAWN_BYTES:
                        sums[number] += float(tensor.double().square().sum())

    def after_root(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        tensors = leaves(inputs)
        self._outputs += [v for v in pytree.tree_leaves(outputs) if isinstance(v, Tensor)]
        self.record.forwards.append(
            Forward(
                module=type(module).__name__,
                inputs=[row_checksums(tensor) for tensor in tensors],
                shapes=[tuple(tensor.shape[1:]) for tensor in tensors],
                outputs=[row_checksums(tensor) for tensor in leaves(outputs)],
                from_end=[row_checksums(tensor.flip(1)) for tensor in tensors if tensor.dim() > 1],
                rows=len(tensors[0]) if tensors else 0,
                step=len(self.record.steps),
                micro=len(self._step.micros),
            )
        )

    # Backward passes

    def _watch_gradient(self, module: nn.Module, name: str, parameter: Tensor) -> None:
        if id(parameter) in self._hooked or debug_unwrap(parameter) is not parameter:
            return  # the parameter of a transformed function (torch.func) ends with its call
        self._hooked[id(parameter)] = parameter
        self.record.gradient_hooks |= bool(parameter._backward_hooks)
        key = (id(module), name)
        self._places[key] = module
        parameter.register_hook(partial(self._add_gradient, key))  # type: ignore[no-untyped-call]

    def _add_gradient(self, key: tuple[int, str], gradient: Tensor) -> None:
        if not is_distributed_tensor(gradient):
            value = full_copy(gradient, self.record.every) / self.scale
            self._local[key] = self._local[key] + value if key in self._local else value

    def before_backward(self, tensors: Any, gradients: Any = None) -> None:
        self._end_step()
        self.in_backward = True
        self.record.backward_passes += 1
        self._local, self._ends = {}, []
        for kind in self.flow.origins([tensors]):
            for number, buffers in self._followed.pop(kind, {}).items():
                step = [*self.record.steps, self._step][number]
                step.buffers = buffers | step.buffers  # the first ones of a step
        both = (tensors, gradients)
        value, gradient = (v[0] if isinstance(v, list | tuple) and v else v for v in both)
        if isinstance(value, Tensor) and value.numel() == 1:
            gradient = torch.ones_like(value) if gradient is None else gradient
            self._micro.loss = float((value.detach() * gradient).sum()) / self.scale
            loss, self.loss_of_engine = self.loss_of_engine, None
            if isinstance(loss, Tensor) and loss.numel() == 1 and loss.any():
                self._micro.scale = self._micro.loss / float(loss)
            if value.grad_fn is not None and not value._backward_hooks:
                with self._recording(), suppress(RuntimeError):
                    self._ends = [*ends_of(value, gradient)]
                    self._micro.means = mean_of(value, gradient, self._ends)
                    self._micro.terms = [term for term, *_ in self._ends]
        self._micro.place = user_place() or ""

    def after_backward(self) -> None:
        self.in_backward = False
        self._outputs = []
        self._locals_of_micros.append(self._local)
        self._step.micros.append(self._micro)
        self._micro = Micro()

    def loss_called(
        self,
        name: str,
        options: dict[str, float | str],
        target: Any,
        value: Tensor,
        of_row: Callable[[int], Tensor],
    ) -> None:
        """Note a call of a loss function; `of_row` computes the loss of one row of targets."""
        weight, ignored = 0.0, int(options.get("ignore_index", -100))
        counted = None
        if isinstance(target, Tensor):
            weight = float(target.numel())
            if not target.is_floating_point() and target.dtype != torch.bool:
                counted = (target.detach() != ignored).flatten().cpu()
                weight = float(counted.sum())
        self._micro.losses.append(
            LossCall(
                function=name,
                reduction=str(options.get("reduction", "mean")),
                weight=weight,
                value=float(value.detach().sum()),
                counted=None if self.record.steps else counted,
                options=options,
                couples=not self.record.steps and self._couples(of_row, target, ignored),
            )
        )

    def _couples(self, of_row: Callable[[int], Tensor], target: Any, ignored: int) -> bool:
        """True if the loss of one row depends on several rows of the model's outputs."""
        row = 0
        if isinstance(target, Tensor) and target.dim() and not target.is_floating_point():
            counting = (target != ignored).reshape(len(target), -1).any(1)
            row = int(counting.nonzero()[0]) if bool(counting.any()) else 0
        outputs = [output for output in self._outputs if output.requires_grad and output.dim()]
        if any(output._backward_hooks for output in outputs):
            return False  # FSDP gathers parameters in hooks of the outputs' gradients
        gradients: Sequence[Tensor | None] = []
        with self._recording(), suppress(RuntimeError, IndexError, TypeError, ValueError):
            loss = of_row(row)
            gradients = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True)
        rows = [(g != 0).reshape(len(g), -1).any(1).sum() for g in gradients if g is not None]
        return any(int(number) > 1 for number in rows)

    def collective(self, name: str, values: Sequence[Any]) -> None:
        """Note an exchange of results of the model: torch.distributed's gathers return no gradient.

        Inside of the model, a gather of parameters is none.
        """
        if self._busy:
            return
        self.record.collectives += 1
        if self.in_backward or not (self._stack or self.record.forwards):
            return
        flat = [v for value in values for v in (value if isinstance(value, list) else [value])]
        tensors = [v for v in flat if isinstance(v, Tensor) and v.is_floating_point()]
        tensors = [v for v in tensors if v.numel() > 1]
        returns_gradients = _inside_autograd_function()
        if self._stack and not returns_gradients:
            tensors = [v for v in tensors if v.requires_grad and not v.is_leaf]
        if tensors and (returns_gradients or name in GATHERS):
            places = self._micro.exchanges if returns_gradients else self._micro.gathers
            places.append(f"{name} at {(user_place() or '').split(' < ')[0]}")

    # Clipping and optimizer steps

    def before_clip(self, parameters: Sequence[Tensor]) -> None:
        with self._recording():
            gradients = full_copies([p.grad for p in parameters], self.record.every)
            self._clipped.append(dict(zip(map(id, parameters), gradients, strict=True)))

    def after_clip(self, function: str, norm: Any, limit: float) -> None:
        with self._recording():
            value = float(full_copy(norm)) if isinstance(norm, Tensor) else None
            scaled = self.scale != 1.0 and not self.unscaled
            self._step.clips.append(
                Clip(
                    norm=value, limit=limit, function=function, scaled=scaled, scale=self.scale,
                    micros=len(self._step.micros),
                )
            )  # fmt: skip

    def before_step(self, optimizer: Any) -> None:
        if self._skips(optimizer):
            inside = [parameter.grad for parameter in trained_parameters(optimizer)]
            self._step.sizes += [_size(inside)] if self._step.sizes else []
            return
        again = self._in_step is optimizer  # a closure that computes the gradient
        self._in_step = optimizer
        if not self.record.steps and "RANK" not in os.environ:
            self._process = os.getpid()  # the script may fork its ranks
        with self._recording():
            if dist.is_available() and dist.is_initialized():
                # It may leave its group before it ends.
                self.record.joined, (self.record.rank, self.record.ranks) = True, _place()
            number = self._number_of(optimizer)
            if number in self._stepped and not again:
                self._end_step()
            deepspeed = is_a(type(optimizer), "DeepSpeedEngine")
            if number is None:
                if self._changes_only(optimizer) or self._only_makes_state(optimizer):
                    return
                number = self._add(optimizer, deepspeed=deepspeed)
            step, chosen = self._step, self._slices[number]
            parameters = self._parameters[chosen]
            step.gradients += [None] * (len(self._parameters) - len(step.gradients))
            scale = 1.0 if deepspeed else float(getattr(optimizer, "grad_scale", None) or 1.0)
            every = self.record.every
            copies = [  # DeepSpeed's full gradients come one at a time
                (gradient if gradient is None else full_copy(gradient, every) / scale, size)
                for gradient in gradients_of(parameters, deepspeed=deepspeed)
                for size in [_size([gradient]) if deepspeed else (0.0, 0)]
            ]
            step.gradients[chosen] = [copy for copy, _ in copies]
            step.local_norms += [0.0] * (len(self._parameters) - len(step.local_norms))
            step.local_norms[chosen] = [norm / scale for norm in local_norms(parameters)]
            norms, counts = [size[0] for _, size in copies], [size[1] for _, size in copies]
            step.sizes = [(math.hypot(*norms), sum(counts))] if deepspeed else []
            limit = float(optimizer.gradient_clipping()) if deepspeed else 0.0
            if limit:
                micros = len(step.micros)
                step.clips = [Clip(norm=None, limit=limit, scaled=False, scale=1.0, micros=micros)]
            step.evaluations += again or not self._stepped
            inner = optimizer.optimizer if deepspeed else optimizer
            step.state_is_new |= number in self._with_state and not _unwrapped(inner).state
            self._settings[number] = [_settings(inner, group) for group in inner.param_groups]
            step.settings = [group for n in sorted(self._settings) for group in self._settings[n]]
            if number in self._last_steps and not again:
                values = full_parameters(parameters, deepspeed=deepspeed, every=every)
                for n, value in enumerate(values, chosen.start):
                    if not torch.equal(value, self._last_steps[number].after[n]):
                        step.moved[n] = checksum(value)
            step.in_backward |= self.in_backward
            self._number_gradients()
            for clip, gradients_by_id in zip(step.clips, self._clipped, strict=False):
                clip.gradients = [
                    gradients_by_id.get(id(parameter)) for parameter in self._parameters
                ]

    def _number_gradients(self) -> None:
        """Give the micro-batches of this step their gradients, by parameters of the optimizers."""
        numbers = {id(parameter): n for n, parameter in enumerate(self._parameters)}
        for micro, gradients in zip(self._step.micros, self._locals_of_micros, strict=True):
            for key, gradient in gradients.items():
                position = numbers.get(id(self._places[key]._parameters.get(key[1])))
                if position is not None:
                    micro.gradients[position] = gradient

    def after_step(self, optimizer: Any) -> None:
        if self._skips(optimizer):
            return
        self._in_step = None
        number = self._number_of(optimizer)
        if number is None:
            return
        step, chosen = self._step, self._slices[number]
        deepspeed = is_a(type(optimizer), "DeepSpeedEngine")
        with self._recording():
            parameters = self._parameters[chosen]
            step.after += [torch.empty(0)] * (len(self._parameters) - len(step.after))
            every = self.record.every
            step.after[chosen] = full_parameters(parameters, deepspeed=deepspeed, every=every)
            gradients = full_copies([] if deepspeed else [p.grad for p in parameters], every)
            pairs = zip(step.gradients[chosen], gradients, strict=False)
            if any(a is not None and b is not None and not torch.equal(a, b) for a, b in pairs):
                step.reduced = step.reduced or list(step.gradients)
                step.reduced[chosen] = gradients
        inner = optimizer.optimizer if deepspeed else optimizer
        self._with_state |= {number} if _unwrapped(inner).state else set()
        if number not in self._last_steps:
            self.record.optimizer_facts[number].state_types = _state_types(inner)
        self._stepped.add(number)
        alone = not self._parts and sum(ref() is not None for ref in self.optimizers) <= 1
        if not self.in_backward and (alone or self._stepped in self._parts):
            self._end_step()

    def add_optimizer(self, optimizer: Any) -> None:
        """Note a new optimizer.  Passes before the first one measure a model, or prepare it."""
        if not self.optimizers:
            self.begin_step()
            self._micro, self.record.calls = Micro(), {}
            for forward in self.record.forwards:
                forward.step = -1
        self.optimizers.append(weakref.ref(optimizer))

    def begin_step(self) -> None:
        """Forget the backward passes and clips since the last step: a scaler skipped a step."""
        self._end_step()
        self._step, self._locals_of_micros, self._clipped = Step(), [], []
        self._stepped, self._settings = set(), {}
        self._depth_of_buffers = 0
        self.unscaled = False

    def _end_step(self) -> None:
        """End the step of all optimizers that have stepped since the last backward pass."""
        self._close_step()
        if self._took_all_steps() or self.record.refusal:
            self.finish()

    def _took_all_steps(self) -> bool:
        """True if every part has taken its steps, or if one of them steps too seldom."""
        if len(self.record.steps) < self.plan.steps:
            return False
        numbered = set(map(id, self._parameters))
        of_models = {id(parameter) for root in self._roots for parameter in root.parameters()}
        created = filter(None, (reference() for reference in self.optimizers))
        updated = [set(map(id, trained_parameters(optimizer))) for optimizer in created]
        if any(ids and ids <= of_models - numbered for ids in updated):
            least = 0  # an optimizer of these models has taken no step yet
        else:
            counts = Counter(step.part for step in self.record.steps)
            least = min(counts.values())
        return least >= self.plan.steps or len(self.record.steps) >= MOST_STEPS * self.plan.steps

    def _close_step(self) -> None:
        if not self._stepped:
            return
        if self._step.in_backward:
            self._number_gradients()
        if not self.record.steps:
            self._find_twins()
        if self._stepped not in self._parts:
            if any(self._stepped & part for part in self._parts):
                self.record.refusal = (
                    "optimizers that took a step together take one apart from each other"
                )
            self._parts.append(self._stepped)
        self._step.part = self._parts.index(self._stepped)
        self._last_steps |= dict.fromkeys(self._stepped, self._step)
        self.record.steps.append(self._step)
        self._stepped = set()
        self.begin_step()

    def _number_of(self, optimizer: Any) -> int | None:
        number = next((n for n, ref in enumerate(self._stepping) if ref() is optimizer), None)
        return number if number is not None else self._successor_of(optimizer)

    def _successor_of(self, optimizer: Any) -> int | None:
        """Number of an optimizer that is gone, whose work this one continues: a resumed training.

        The new model has the same parameters; its optimizer takes their places.
        """
        if not self.record.steps:
            return None
        gc.collect()
        parameters = trained_parameters(optimizer)
        shapes = [tuple(parameter.shape) for parameter in parameters]
        for number, reference in enumerate(self._stepping):
            if reference() is None and self.record.shapes[self._slices[number]] == shapes:
                self._stepping[number] = weakref.ref(optimizer)
                self._parameters[self._slices[number]] = parameters
                return number
        return None

    def _changes_only(self, optimizer: Any) -> bool:
        """True for an optimizer whose steps are changes of the weights between two steps.

        An outer optimizer of local SGD, or one of another model, needs no backward pass.
        """
        numbered = set(map(id, self._parameters))
        updated = set(map(id, trained_parameters(optimizer)))
        of_models = {id(parameter) for root in self._roots for parameter in root.parameters()}
        after_a_step = self._stepping and (self._stepped or not self._step.micros)
        unseen = self.record.steps and not updated & of_models
        if after_a_step and (updated <= numbered or unseen):
            return True
        if updated & numbered:
            self.record.refusal = "two optimizers take steps with the same parameters"
            self.finish()
        return False

    def _only_makes_state(self, optimizer: Any) -> bool:
        """True for a step before any backward pass, with zeros: a checkpoint needs a state."""
        parameters = () if self.record.backward_passes else trained_parameters(optimizer)
        gradients = [full_copy(p.grad) for p in parameters if p.grad is not None]
        return bool(gradients) and not any(gradient.any() for gradient in gradients)

    def _skips(self, optimizer: Any) -> bool:
        """True for an optimizer inside of another one, or of DeepSpeed's engine."""
        inside = self._in_step is not None and self._in_step is not optimizer
        engine = is_a(type(optimizer), "DeepSpeedEngine")
        return inside or ("DeepSpeed" in self.record.frameworks and not engine)

    def _add(self, optimizer: Any, *, deepspeed: bool) -> int:
        """Add an optimizer to those that take steps; returns its number."""
        parameters = trained_parameters(optimizer)
        first = len(self._parameters)
        self._stepping.append(weakref.ref(optimizer))
        self._slices.append(slice(first, first + len(parameters)))
        self._parameters += parameters
        living_modules = (v for v in gc.get_objects() if issubclass(type(v), nn.Module))
        uncalled = [m for m in living_modules if is_a(m, REPLICA) and m not in self._roots]
        roots = [*enumerate((*self._roots, *uncalled), 1)]
        roots.sort(key=lambda pair: -len([*pair[1].parameters()]))  # names of the largest module
        modules = {id(module): module for _, root in roots for module in root.modules()}.values()
        self._find_groups(modules)
        names = {
            id(parameter): (number, plain_name(name))
            for number, root in reversed(roots)
            for name, parameter in root.named_parameters()
        }
        living = [created for ref in self.optimizers if (created := ref()) is not None]
        self.record.optimizers += [n for n, o in enumerate(living) if o is optimizer]
        inner = optimizer.optimizer if deepspeed else optimizer
        self.record.optimizer_facts.append(_facts(inner, parameters))
        first_group = sum(map(len, self._settings.values()))
        self.record.groups += [first_group + n for n in _groups(inner, parameters)]
        for n, parameter in enumerate(parameters, first):
            model, name = names.get(id(parameter), (0, f"parameter {n} of the optimizer"))
            again = name in self.record.names
            self.record.names.append(f"model {model}: {name}" if again else name)
        self.record.parts += [len(self._parts)] * len(parameters)
        slices = flat_slices(modules)
        numbered = [*enumerate(parameters, first)]
        self.record.flat_slices |= {n: slices[id(p)] for n, p in numbered if id(p) in slices}
        self.record.strangers += sum(id(p) not in names for p in parameters)
        for parameter in parameters:
            (value,) = full_parameters([parameter], deepspeed=deepspeed)
            self.record.before.append(sampled(value, self.record.every).clone())
            self.record.start.append(checksum(value))
            self.record.initial.append(self._initial.get(id(parameter)))
            self.record.shapes.append(tuple(value.shape))
            if not self.plan.replays and (self.record.flat_slices or _place()[0] == 0):
                self._start.append(value)
        states = [] if deepspeed else [s for s in optimizer.state.values() if isinstance(s, dict)]
        steps = [int(state.get("step", 1)) for state in states if state]
        self.record.resumed_at = max([self.record.resumed_at, *steps])
        if not self._unowned and not self.record.flat_slices and not deepspeed:
            owned = set(map(id, self._parameters))
            self._unowned = {
                id(parameter): (plain_name(name), parameter, checksum(_local(parameter)))
                for root in self._roots[:1]
                for name, parameter in root.named_parameters()
                if parameter.grad is not None and id(parameter) not in owned
            }
        return len(self._stepping) - 1

    def _find_groups(self, modules: Iterable[nn.Module]) -> None:
        """Find the libraries that wrap the model, and those that reduce over some ranks only."""
        sizes = [(frameworks_of(m)[0], n) for m in modules if (n := reducing_ranks(m)) is not None]
        self.record.frameworks = list(dict.fromkeys((*self.record.frameworks, *dict(sizes))))
        self.record.small_groups |= {
            library: size for library, size in sorted(sizes, reverse=True) if size < _place()[1]
        }

    def _find_twins(self) -> None:
        """Find equal matrices of modules of different classes, as those of tied weights are."""
        owners = {
            id(parameter): type(module)
            for root in self._roots
            for module in root.modules()
            for parameter in module._parameters.values()
            if parameter is not None
        }
        first: dict[tuple[Any, ...], int] = {}
        for number, (parameter, value) in enumerate(
            zip(self._parameters, self.record.before, strict=True)
        ):
            shape = self.record.shapes[number]
            if len(shape) < 2 or id(parameter) not in owners:
                continue
            other = first.setdefault((shape, self.record.start[number]), number)
            differs = owners[id(parameter)] is not owners[id(self._parameters[other])]
            if differs and torch.equal(value, self.record.before[other]) and value.std() > 0:
                self.record.twins.append((self.record.names[other], self.record.names[number]))

    # Data and random numbers

    def batches(
        self, loader: Any, number: int, iterate: Callable[[], Iterator[Any]]
    ) -> Iterator[Any]:
        with self._recording():
            facts = described(loader)
        self.record.loaders.append(facts)
        stored: list[Any] = []
        self._batches.append(stored)
        facts.number = number
        self._order = order = Order(facts)
        self._orders += [order] if len(self._orders) < MOST_ORDERS else []
        passes = self.record.backward_passes
        for batch in iterate():
            facts.trains |= self.record.backward_passes > passes
            self._micro.loaders.append(number)
            stored.append(stored[0] if self.skips and stored else copied(batch))
            facts.batches += 1
            first = [row_checksums(leaf[:1]) for leaf in leaves(batch) if leaf.numel()]
            facts.sums.append(sum(map(float, first)))
            yield batch
            self._order = order

    def next_index(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        """Note the indices of a batch that a loader is about to load, here or in a worker."""
        index = original(iterator)
        self._order.batches.append(index)
        self._order.rest = iterator._sampler_iter
        return index

    def length_of(self, _number: int, length: int) -> int:
        package = sys._getframe(3).f_globals.get("__name__", "").partition(".")[0]
        self.record.asked_lengths |= not self._busy and package not in LIBRARIES_OF_LOADERS
        return length

    @property
    def in_forward_pass(self) -> bool:
        """True in the forward pass of a module of which gradients are computed."""
        return bool(self._stack) and (torch.is_grad_enabled() or self._passes_compiled)

    def draw(self, place: str, value: Tensor, own_seed: bool) -> Tensor | None:
        """Record a draw.  A replay returns the ranks' draws in its place."""
        if self._busy or self.in_backward:
            return None
        self._drawn_bytes += value.numel() * value.element_size()
        if self._drawn_bytes > MOST_DRAWN_BYTES:
            return None
        drawn = value.detach().to("cpu", copy=True)
        with_gradients = self.in_forward_pass or torch.is_grad_enabled()
        forward = len(self.record.forwards) if with_gradients else 0
        if self.in_forward_pass:
            self.record.forward_draws.setdefault(forward, []).append(drawn)
        else:
            draw = Draw(place=place, value=drawn, forward=forward, own_seed=own_seed)
            self.record.draws.append(draw)
        self.record.own_seed |= own_seed
        return None

    # End

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Keep the hooks from seeing what the observer does itself."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def write(self) -> None:
        """Write the record, at the latest when the process ends."""
        atexit.unregister(self.write)
        if self._written or os.getpid() != self._process:  # the script may fork
            return
        self._close_step()
        if not self.record.steps and not self.record.refusal and not self._roots:
            return  # a launcher, or a worker of a data loader
        self._busy = self._written = True
        if not self.record.joined:
            self.record.rank, self.record.ranks = _place()
        states = sys.modules.get("accelerate.state")
        state = {} if states is None else states.PartialState._shared_state
        alone = state.get("num_processes", state.get("_num_processes", 0)) == 1
        seed = torch.initial_seed()
        self.record.seed = None if seed == self._seed_at_start else seed
        self.record.draws_elsewhere = self._generators != _generators()
        dynamo = sys.modules.get("torch._dynamo.utils")
        self.record.graphs = 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]
        self.record.servers = sorted(SERVERS & sys.modules.keys())
        self.record.on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
        self.record.accelerate_alone = alone and not torch.cuda.is_available()
        kind = torch.optim.lr_scheduler.LRScheduler
        for schedule in (value for value in gc.get_objects() if issubclass(type(value), kind)):
            self.record.schedules.append(type(schedule).__name__)
            self.record.schedule_settings |= _schedule_settings(schedule)
            values = [getattr(schedule, name, None) for name in TOTALS]
            self.record.totals += [value for value in values if isinstance(value, int) and value]
        if self._roots and self.record.steps:
            numbered = set(map(id, self._parameters))
            named = [pair for root in self._roots for pair in root.named_parameters()]
            names = (plain_name(name) for name, p in named if id(p) not in numbered)
            self.record.frozen = list(dict.fromkeys(names))
            orphans = [facts for key, facts in self._unowned.items() if key not in numbered]
            for name, value, old in orphans:
                if checksum(_local(value)) == old:
                    self.record.orphans.append(name)
                else:
                    self.record.copied.append(old)
            # Sharded parameters leave tensors without memory behind, which must not be read.
            replicated = not {"FSDP1", "FSDP2", "DeepSpeed"} & {*self.record.frameworks}
            averages = replicated and not self.plan.replays and len(self._parts) == 1
            self.record.average = self._average() if averages else []
        for order in self._orders:
            order.read()
        self.record.ended_early = len(self.record.steps) < self.plan.steps
        path = rank_file(self.plan.directory, self.record.rank)
        if not self.plan.replays:
            save(self._batches, path.with_suffix(BATCHES))
        if self._start:
            save(self._start, path.with_suffix(START))
        self.record.save(path)

    def _average(self) -> list[Tensor]:
        """A second set of the parameters that changed, but not to their values: a mean of them."""
        steps = self.record.steps
        recorded = [t for s in steps for t in (*s.gradients, *s.after, *s.reduced)]
        ids = {id(t) for t in (*self._parameters, *self._start, *self.record.before, *recorded)}
        before, after = self.record.before, steps[-1].after
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        orders = [
            [*range(len(self._parameters))],
            *([numbers[id(p)] for p in r.parameters() if id(p) in numbers] for r in self._roots),
        ]
        orders = [order for order in orders if len(order) == len(numbers)]
        shapes = [[self.record.shapes[n] for n in order] for order in orders]
        for value in gc.get_objects():
            kind = type(value)
            if issubclass(kind, nn.Module):
                tensors = [*value.parameters()]
            elif kind in {dict, list}:
                tensors = list(value.values()) if kind is dict else value
            else:
                continue
            if len(tensors) < len(shapes[0]) or not all(type(t) in DENSE for t in tensors):
                continue
            tensors = [t for t in tensors if tuple(t.shape) in {*shapes[0]}]
            of_tensors = [tuple(t.shape) for t in tensors]
            if of_tensors in shapes and not ids & set(map(id, tensors)):
                order = orders[shapes.index(of_tensors)]
                by_number = dict(zip(order, tensors, strict=True))
                copies = [full_copy(by_number[n], self.record.every) for n in sorted(by_number)]
                earlier = [before, *(step.after for step in steps)]  # a checkpoint, as of a restart
                near = _distance(copies, after) <= _distance(before, after)
                if near and not any(_copies(copies, values) for values in earlier):
                    return copies
        return []

    def finish(self) -> None:
        """Write the record and end the process, with the other ranks."""
        self.write()
        sys.stdout.flush()
        sys.stderr.flush()
        if not self.record.refusal and dist.is_available() and dist.is_initialized():
            timer = threading.Timer(LONGEST_WAIT_SECONDS, os._exit, [0])
            timer.daemon = True
            timer.start()
            with suppress(RuntimeError):
                dist.barrier()
        os._exit(0)


def _generators() -> bytes:
    numpy = sys.modules.get("numpy")
    return pickle.dumps((random.getstate(), numpy and numpy.random.get_state()))


def _local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor."""
    value = tensor.detach()
    return value.to_local() if is_distributed_tensor(value) else value  # type: ignore[attr-defined]


def _size(gradients: Iterable[Tensor | None]) -> tuple[float, int]:
    """Norm of gradients together, and the number of their elements."""
    present = [gradient for gradient in gradients if gradient is not None]
    norms = (float(gradient.float().norm()) for gradient in present)  # a norm of 16 bits is rough
    return math.hypot(*norms), sum(gradient.numel() for gradient in present)


def _schedule_settings(schedule: Any) -> dict[str, float]:
    """Numbers of a schedule, and of the functions with fixed arguments that it calls."""
    values = dict(vars(schedule))
    for function in values.pop("lr_lambdas", []):
        values |= getattr(function, "keywords", {})
    return {
        f"{type(schedule).__name__}.{name}": float(value)
        for name, value in values.items()
        if type(value) in {int, float} and not name.startswith("_") and name != "last_epoch"
    }


def _place() -> tuple[int, int]:
    """This process's rank, and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _weigh_alike(sizes: Tensor) -> bool:
    chosen = sizes[sizes > 0]
    return bool(len(chosen) and chosen.max() <= 1.001 * chosen.min())


End = tuple[Term, Tensor, list[tuple[Any, int]], set[str]]
"""A term of a loss with the weights of its results, the functions and the numbers of the arguments
that lead to it, and the names of those functions that make a sum larger."""


@torch.no_grad()
def ends_of(loss: Tensor, gradient: Tensor) -> Iterator[End]:
    """Follow a loss through functions that are linear."""
    pending: list[tuple[Any, ...]] = [(loss.grad_fn, gradient, [], [1.0], set())]
    while pending:
        node, weights, path, factors, grows = pending.pop()
        kind, _, number = node.name().partition("Backward")
        sink = kind == "_DDPSink" and len(node.next_functions) == 1  # DDP's own: what it gets
        if not sink and (kind not in LINEAR or not number):  # those of scripts have none
            reduction = 0 if weights.numel() > 1 else getattr(node, "_saved_reduction", 0)
            count = reduction % 2 if reduction else int((weights != 0).sum())
            term = Term(function=kind, count=count, factors=factors, is_mean=reduction == 1)
            yield term, weights, path, grows
            continue
        results = weights if sink else node(weights)
        results = results if isinstance(results, tuple) else (results,)
        for edge, result in enumerate(results[: len(node.next_functions)]):
            following = node.next_functions[edge][0]
            if following is None or result is None or not result.any():
                continue
            sizes, before = result.abs(), weights.abs()
            factor = float(sizes.max() / before.max())
            if kind in {"Mul", "Div"} and sizes.shape == before.shape:
                other: object = None  # or a number
                with suppress(AttributeError, RuntimeError):  # the script has changed it since
                    other = getattr(node, ("_saved_other", "_saved_self")[edge])
                if isinstance(other, Tensor) and other.dim():
                    factor = 1.0  # it is none of all rows
            grown = grows | {kind} if sizes.sum() > 1.001 * before.sum() else grows
            # A sum of thousands of terms has as many functions on a way, which multiply by 1.
            product = [*factors, factor] if factor != 1 else factors
            pending.append((following, result, [*path, (node, edge)], product, grown))


@torch.no_grad()
def mean_of(loss: Tensor, gradient: Tensor, ends: Sequence[End]) -> list[LossCall]:
    """Return the mean that a loss is a multiple of, if its graph shows one.

    Its elements are the results of the first function that is not linear, and weigh alike.  A sum
    of terms is no mean, nor what a number above 1 multiplies: it may stand against a division.
    """
    ((_, weights, _, grows),) = ends if len(ends) == 1 else ((None, gradient * 0, [], set()),)
    sizes = weights.abs().double()
    if sizes.dim() > 1 and not _weigh_alike(sizes):
        sizes = sizes.sum(-1)  # targets that are shares of classes
    if grows & {"Mul", "Div"} or not _weigh_alike(sizes) or sizes.numel() < 2:
        return []  # one number may be a mean by itself, or the root of one
    chosen = sizes[sizes > 0]
    value = float((loss * gradient).sum() / chosen.sum())
    rows = (sizes > 0).reshape(len(sizes) if sizes.dim() else 1, -1).sum(1).cpu()
    options = {"sums": bool(grows)}
    facts: dict[str, Any] = {"function": "mean", "reduction": GRAPH, "options": options}
    return [LossCall(**facts, weight=float(len(chosen)), value=value, counted=rows)]


def trained_parameters(optimizer: Any) -> list[Tensor]:
    """Parameters that an optimizer or DeepSpeed's engine updates, in its order."""
    if is_a(type(optimizer), "DeepSpeedEngine"):
        return [p for p in optimizer.module.parameters() if p.requires_grad]
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _settings(optimizer: Any, group: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that configure a parameter group; `betas` gives `betas[0]` and so on."""
    settings = {}
    for name in ("lr", *getattr(optimizer, "defaults", {})):
        value = group.get(name)
        pairs = enumerate(value) if isinstance(value, tuple | list) else ()
        numbers = {name: value, **{f"{name}[{index}]": item for index, item in pairs}}
        for key, number in numbers.items():
            scalar = isinstance(number, Tensor) and number.numel() == 1
            if scalar or (isinstance(number, int | float) and not isinstance(number, bool)):
                settings[key] = float(number)
    return settings


def _facts(optimizer: Any, parameters: Sequence[Tensor]) -> OptimizerFacts:
    inner = _unwrapped(optimizer)
    group = inner.param_groups[0]
    rate = group.get("initial_lr", group.get("lr"))
    return OptimizerFacts(
        path=f"{type(inner).__module__}:{type(inner).__qualname__}",
        types=sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}),
        switches=[name for name in getattr(inner, "defaults", group) if group.get(name) is True],
        initial_lr=None if rate is None else float(rate),
    )


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of torch's ZeroRedundancyOptimizer or of DeepSpeed's optimizers."""
    for name in ("optim", "optimizer"):
        optimizer = getattr(optimizer, name, optimizer)
    return optimizer


def _groups(optimizer: Any, parameters: Sequence[Tensor]) -> list[int]:
    """Position of each parameter's group; 0 where the optimizer has other tensors instead."""
    groups = [group["params"] for group in optimizer.param_groups]
    for name in ("bit16_groups", "fp16_groups"):  # DeepSpeed has flat tensors
        groups = getattr(optimizer, name, groups)
    numbers = {id(p): number for number, group in enumerate(groups) for p in group}
    return [numbers.get(id(parameter), 0) for parameter in parameters]


def _state_types(optimizer: Any) -> dict[str, str]:
    """Types of the optimizer's tensors by key, without counters."""
    states = [s for s in _unwrapped(optimizer).state.values() if isinstance(s, Mapping)]
    return {
        str(key): str(value.dtype).removeprefix("torch.")
        for state in states
        for key, value in state.items()
        if is_tensor(value) and value.numel() > 1 and value.is_floating_point()
    }


def _dropout(root: nn.Module) -> dict[str, float]:
    """Probabilities of the modules that drop elements, 0 for those in evaluation mode."""
    probabilities = {}
    for name, module in root.named_modules():
        value = module.p if is_a(module, "_DropoutNd") else getattr(module, "dropout", None)
        if isinstance(value, float):
            probabilities[plain_name(name)] = value if module.training else 0.0
    return probabilities


def _distance(values: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    return math.hypot(*(float((a - b).norm()) for a, b in zip(values, others, strict=True)))


def _copies(values: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """True if tensors are equal to others, or to what rounding to 16 bits leaves of them."""
    return any(
        all(torch.equal(a, b.to(t).to(a.dtype)) for a, b in zip(values, others, strict=True))
        for t in (torch.float32, torch.bfloat16, torch.float16)
    )


def _buffers(module: nn.Module, without: Sequence[nn.Module] = ()) -> dict[str, Tensor]:
    """Buffers by name, without those of some modules inside."""
    left_out = {id(buffer) for other in without for buffer in other.buffers()}
    return {
        plain_name(name): full_copy(buffer)
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point() and id(buffer) not in left_out
    }


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _inside_autograd_function() -> bool:
    """True in the forward pass of a function that defines its gradient itself.

    Checkpointing is none, nor is batch norm that shares its statistics.
    """
    frame = sys._getframe(2)
    while frame is not None:
        context = frame.f_locals.get("ctx")
        if context is not None and hasattr(context, "save_for_backward"):
            return frame.f_globals["__name__"] not in NO_EXCHANGES
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
