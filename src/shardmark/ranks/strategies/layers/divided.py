"""Divides a model's layers over tensor ranks by a workload's plan, and trains what they hold."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from shardmark.ranks.strategies.step import (
    EagerWorker,
    by_mesh,
    local_shard,
    loss_scaler,
    unsharded,
)
from shardmark.ranks.workloads.base import Batch, CannotShard, TensorPlan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel.style import ParallelStyle

    from shardmark.ranks.measure.step.recorder import Spans

DIVIDED = {"column": (nn.Linear,), "row": (nn.Linear, nn.Embedding), "gathered": (nn.Linear,)}
"""Ways to divide a layer, and the layers that torch can divide in this way."""
STYLES = (*DIVIDED, "summed")
OTHER_STRATEGY = "use fsdp, or ddp"
SEQUENCE_DIM = 1


def problems_with(
    plan: TensorPlan | CannotShard,
    model: nn.Module,
    ranks: int,
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
) -> Iterator[CannotShard]:
    """Yield the reasons why the plan cannot divide the model over this number of ranks."""
    if isinstance(plan, CannotShard):
        yield plan
        return
    styles = styled_modules(model, plan)
    yield from _unclear(plan, styles)
    for quantity, count in plan.units.items():
        yield from _uneven(f"{count} {quantity}", count, ranks)
    for name, (module, style) in styles.items():
        if style in DIVIDED and not isinstance(module, DIVIDED[style]):
            kind = type(module).__name__
            yield CannotShard(f"its plan divides {name}, a {kind}, as {style!r}", OTHER_STRATEGY)
        side = {"column": "out_features", "row": "in_features"}.get(style, "")
        features = getattr(module, side, 0)  # tokens may be uneven
        yield from _uneven(f"{features} features of {name}", features, ranks)
    for tied in _tied(model):
        if (
            len({placement_of(module, name, _style_of(styles, module)) for module, name in tied})
            > 1
        ):
            names = [name for name, (module, _) in styles.items() if (module, "weight") in tied]
            reason = f"tied weights of {' and '.join(names)} are divided in two ways"
            yield CannotShard(reason, "untie them, or let the plan divide all of them by tokens")
    if loss_parallel and "gathered" not in plan.styles.values():
        yield CannotShard(
            "its plan does not say which layer gives logits", "set loss_parallel: false"
        )
    if sequence_parallel:
        yield from _sequence_problem(plan, ranks)


def _unclear(plan: TensorPlan, styles: Mapping[str, object]) -> Iterator[CannotShard]:
    """Yield patterns that match nothing, and modules that match two different styles."""
    for pattern, style in plan.styles.items():
        if style not in STYLES:
            yield CannotShard(f"its plan divides {pattern} as {style!r}", OTHER_STRATEGY)
        if not any(fnmatchcase(name, pattern) for name in styles):
            remedy = "name modules as model.named_modules() does"
            yield CannotShard(f"its plan divides {pattern}, which the model lacks", remedy)
    for name in styles:
        ways = {style for pattern, style in plan.styles.items() if fnmatchcase(name, pattern)}
        if len(ways) > 1:
            remedy = "have one style for each module"
            yield CannotShard(f"its plan divides {name} as {' and '.join(sorted(ways))}", remedy)


def _uneven(quantity: str, count: int, ranks: int) -> Iterator[CannotShard]:
    if count % ranks:
        fitting = [str(size) for size in range(2, count + 1) if count % size == 0][:4]
        remedy = f"use {' or '.join(fitting)} tensor ranks" if fitting else OTHER_STRATEGY
        yield CannotShard(f"{quantity} cannot be divided over {ranks} tensor ranks", remedy)


def _sequence_problem(plan: TensorPlan, ranks: int) -> Iterator[CannotShard]:
    length, remedy = plan.sequence_length, "set sequence_parallel: false"
    if length is None:
        reason = "this model needs whole sequences between its divided layers"
        yield CannotShard(reason, remedy)
    elif length % ranks:
        reason = f"sequences of {length} cannot be divided over {ranks} tensor ranks"
        yield CannotShard(reason, remedy)


def styled_modules(model: nn.Module, plan: TensorPlan) -> dict[str, tuple[nn.Module, str]]:
    """Modules and styles of the plan by name, in the model's order, equal on every rank."""
    return {
        name: (module, style)
        for name, module in model.named_modules()
        for pattern, style in plan.styles.items()
        if fnmatchcase(name, pattern)
    }


def _style_of(styles: dict[str, tuple[nn.Module, str]], module: nn.Module) -> str | None:
    return next((style for styled, style in styles.values() if styled is module), None)


def placement_of(module: nn.Module, parameter: str, style: str | None) -> Placement:
    """Placement of a parameter by the plan."""
    if style in {"column", "gathered"} or (style == "row" and isinstance(module, nn.Embedding)):
        return Shard(0)
    return Shard(1) if style == "row" and parameter == "weight" else Replicate()


def divide(
    model: nn.Module,
    plan: TensorPlan,
    mesh: DeviceMesh,
    *,
    parts: Sequence[nn.Module] = (),
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
) -> None:
    """Replace the parameters of divided layers by this rank's shards.

    Every rank has the same model.  `parts` are other modules that share some of its parameters.
    Collective.
    """
    styles, ties = styled_modules(model, plan), _tied(model, *parts)
    for module in _modules(model, *parts):
        style = _style_of(styles, module)
        parameters = dict(module.named_parameters(recurse=False))
        if style in DIVIDED:
            for parameter_name, parameter in parameters.items():
                # `parallelize_module` leaves existing shards unchanged.
                placement = placement_of(module, parameter_name, style)
                module.register_parameter(parameter_name, _part(parameter, mesh, placement))
            torch_style = _torch_style(module, style, sequence_parallel, loss_parallel)
            parallelize_module(module, mesh, torch_style)
        elif parameters and (sequence_parallel or style == "summed"):
            _sum_gradients(module, mesh)
    for (first, first_name), *others in ties:
        for module, name in others:
            module.register_parameter(name, first.get_parameter(first_name))


def _keep_part(parameter: Tensor) -> None:
    """Shard an embedding's gradient, which torch leaves unsharded on every rank."""
    assert isinstance(parameter, DTensor)
    assert isinstance(parameter.grad, DTensor)
    parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


def _part(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Return the parameter as a DTensor with this rank's shard."""
    placed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(placed, requires_grad=parameter.requires_grad)


def _torch_style(
    module: nn.Module, style: str, sequence_parallel: bool, loss_parallel: bool
) -> ParallelStyle:
    between = Shard(SEQUENCE_DIM) if sequence_parallel else Replicate()
    if style == "row":
        tokens = Replicate() if isinstance(module, nn.Embedding) else Shard(-1)
        return RowwiseParallel(input_layouts=tokens, output_layouts=between)
    if style == "column":
        return ColwiseParallel(input_layouts=between)
    logits = Shard(-1) if loss_parallel else Replicate()
    return ColwiseParallel(
        input_layouts=between, output_layouts=logits, use_local_output=not loss_parallel
    )


def _sum_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Sum the gradients of a replicated layer whose activations are sharded over the ranks."""
    forward, group = module.forward, mesh.get_group()
    # torch's attention uses the weights of its last layer without calling it.
    owners = [module, *(module.children() if isinstance(module, nn.MultiheadAttention) else ())]

    def add_up(gradient: Tensor) -> Tensor:
        total = gradient.contiguous()
        dist.all_reduce(total, group=group)
        return total

    def summed(parameter: nn.Parameter | None) -> Tensor | None:
        if parameter is None or not parameter.requires_grad:
            return parameter
        used = parameter.view_as(parameter)  # FSDP2 ignores hooks of the parameter itself
        used.register_hook(add_up)  # type: ignore[no-untyped-call]  # torch's
        return used

    def summing(*args: Any, **kwargs: Any) -> Any:
        originals = [dict(owner._parameters) for owner in owners]
        for owner, parameters in zip(owners, originals, strict=True):
            owner._parameters.update({name: summed(p) for name, p in parameters.items()})
        try:
            return forward(*args, **kwargs)
        finally:
            for owner, parameters in zip(owners, originals, strict=True):
                owner._parameters.update(parameters)

    module.forward = summing


def _modules(*models: nn.Module) -> list[nn.Module]:
    """Modules of the models, without duplicates, in order."""
    return list(dict.fromkeys(chain.from_iterable(model.modules() for model in models)))


def _tied(*models: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Modules and names of each parameter that several modules share."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in _modules(*models):
        for name, parameter in module.named_parameters(recurse=False):
            owners[parameter].append((module, name))
    return [uses for uses in owners.values() if len(uses) > 1]


@contextmanager
def counting_divided(model: nn.Module, plan: TensorPlan) -> Iterator[Counter[str]]:
    """Count the elements of a sample that tensor-parallel ranks communicate, by position.

    `in`: into layers that divide their outputs; `out`: of those that divide their inputs; `rows`:
    of embeddings that divide their tokens; `logits`: of layers whose outputs are gathered.  Calls
    with fewer elements than another are left out: other lengths of a sample.  `calls`: all of them.
    """
    calls: dict[tuple[nn.Module, str], list[int]] = defaultdict(list)

    def elements(tensor: Tensor) -> int:
        return tensor.numel() // tensor.shape[0]

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, *, style: str) -> None:
        if style in {"column", "gathered"}:
            calls[module, "in"].append(elements(inputs[0]))
        if style == "gathered":
            calls[module, "logits"].append(elements(output))
        if style == "row":
            side = "rows" if isinstance(module, nn.Embedding) else "out"
            calls[module, side].append(elements(output))

    counted = Counter[str]()
    with ExitStack() as hooks:
        for module, style in styled_modules(model, plan).values():
            hook = module.register_forward_hook(
                lambda module, inputs, output, style=style: note(
                    module, inputs, output, style=style
                )
            )
            hooks.callback(hook.remove)
        yield counted
    for (_, side), sizes in calls.items():
        counted[side] += sum(size for size in sizes if size == max(sizes))
        counted["calls"] += len(sizes)


def total_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Norm of the gradients over all ranks of each parameter's mesh, shape ()."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = [unsharded(nn.utils.get_total_norm(group)) for group in by_mesh(gradients)]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def clip(parameters: Iterable[nn.Parameter], largest_norm: float, norm: Tensor) -> None:
    for group in by_mesh(parameters):
        nn.utils.clip_grads_with_norm_(group, largest_norm, norm)


class MeshesScaler(torch.amp.GradScaler):
    """Unscales gradients mesh by mesh: torch's scaler checks all of them in a single call."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, *args: Any
    ) -> dict[torch.device, Tensor]:
        infinite_of: dict[torch.device, Tensor] = {}
        unscale: Any = super()._unscale_grads_
        for parameters in by_mesh(p for group in optimizer.param_groups for p in group["params"]):
            of_mesh = SimpleNamespace(param_groups=[{"params": parameters}])
            for device, infinite in unscale(of_mesh, *args).items():
                infinite_of[device] = torch.maximum(infinite_of.get(device, infinite), infinite)
        return infinite_of


@dataclass(kw_only=True, eq=False)
class DividedWorker(EagerWorker):
    """Trains divided layers, with `loss_parallel` also the loss on divided logits."""

    loss_parallel: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        # Hooks are registered last: a module loses them when it is moved to a device.
        for module in self.module.modules():
            weight = module.weight if isinstance(module, nn.Embedding) else None
            if isinstance(weight, DTensor) and weight.requires_grad:
                weight.register_post_accumulate_grad_hook(_keep_part)  # type: ignore[no-untyped-call]  # torch's

    def _built_scaler(self) -> torch.amp.GradScaler:
        return loss_scaler(self.recipe, self._parameters[0].device, MeshesScaler)

    def _clip(self, largest_norm: float) -> None:
        clip(self._parameters, largest_norm, total_norm(self._parameters))

    def step(self, batch: Batch, recorder: Spans) -> Tensor:
        with loss_parallel() if self.loss_parallel else nullcontext():
            return local_shard(super().step(batch, recorder))
