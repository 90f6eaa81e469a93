"""Cuts a model into the stages of a pipeline, and trains the stages of one rank."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves, tree_map_only

from shardmark.base.errors import InputError
from shardmark.base.layout import Shard
from shardmark.base.recipe import Recipe
from shardmark.ranks.measure.step.recorder import NoSpans, Spans
from shardmark.ranks.strategies.layers.divided import (
    OTHER_STRATEGY,
    SEQUENCE_DIM,
    DividedWorker,
    clip,
    total_norm,
)
from shardmark.ranks.strategies.step import autocast, local_shard
from shardmark.ranks.workloads.base import Batch, BatchPlan, CannotShard, Workload

Parts = Sequence[nn.Module]
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call of the model."""
Value = TypeVar("Value")


def problems_of(
    parts: Parts | CannotShard, model: nn.Module, workload: Workload, stages: int
) -> Iterator[CannotShard]:
    """Yield the reasons why the model cannot be cut into this number of stages."""
    if isinstance(parts, CannotShard):
        yield parts
        return
    yield from _of_micro_batches(model, workload)
    yield from _of_parts(parts, model, stages)


def _of_micro_batches(model: nn.Module, workload: Workload) -> Iterator[CannotShard]:
    """Yield the reasons why training in micro-batches would differ from the full batch."""
    if workload.not_additive is not None:
        reason = f"micro-batches cannot have the loss of the whole: {workload.not_additive}"
        yield CannotShard(reason, OTHER_STRATEGY)
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            reason = f"{name}, a batch norm, would take the statistics of each micro-batch"
            yield CannotShard(reason, "use another norm, or ddp")
        drawn = isinstance(module, _DropoutNd) and module.p
        if drawn or (isinstance(module, nn.MultiheadAttention) and module.dropout):
            reason = f"{name}, a dropout, would draw masks in another order than one device"
            yield CannotShard(reason, "set dropout to 0")


def _of_parts(parts: Parts, model: nn.Module, stages: int) -> Iterator[CannotShard]:
    inside = {id(parameter) for part in parts for parameter in part.parameters()}
    missing = [name for name, p in model.named_parameters() if id(p) not in inside]
    if missing:
        reason = f"its pipeline_parts leave out {', '.join(missing[:3])}"
        yield CannotShard(reason, "have every parameter in a part")
    count = len(_with_parameters(parts))
    if count < stages:
        reason = f"{count} parts with parameters do not make {stages} stages"
        yield CannotShard(
            reason, "use fewer ranks, a schedule with one stage a rank, or a deeper model"
        )


def staged(parts: Parts, stages: int) -> list[list[nn.Module]]:
    """The parts of each stage: consecutive ones, such that the costliest stage costs least.

    A part costs its parameters, as each multiplies every token once; embeddings are looked up.
    """
    units = _with_parameters(parts)
    sums = [0, *accumulate(sum(map(_cost, unit)) for unit in units)]

    @cache
    def least(end: int, count: int) -> tuple[int, tuple[int, ...]]:
        """Cost of the costliest of so many stages up to that unit, and where each begins."""
        if count == 1:
            return sums[end], (0,)
        before = ((start, *least(start, count - 1)) for start in range(count - 1, end))
        return min((max(cost, sums[end] - sums[at]), (*begins, at)) for at, cost, begins in before)

    _, begins = least(len(units), stages)
    return [
        [part for unit in units[begin:end] for part in unit]
        for begin, end in pairwise((*begins, len(units)))
    ]


def _with_parameters(parts: Parts) -> list[list[nn.Module]]:
    """Parts in groups that have something to train: a stage without would need no optimizer."""
    units: list[list[nn.Module]] = []
    waiting: list[nn.Module] = []
    for part in parts:
        waiting.append(part)
        if any(parameter.requires_grad for parameter in part.parameters()):
            units.append(waiting)
            waiting = []
    if units:
        units[-1] += waiting
    return units


def _cost(part: nn.Module) -> int:
    return sum(
        parameter.numel()
        for module in part.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    )


def chained(parts: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """Call the parts one after the other; return the last output as contiguous tensors."""
    first, *others = parts
    value = first(*args, **kwargs)
    for part in others:
        value = part(*value) if isinstance(value, tuple) else part(value)
    if isinstance(value, Tensor):  # tree_map takes a tenth of a millisecond
        return value.contiguous()
    return tree_map_only(Tensor, Tensor.contiguous, value)


class _ModelCall(Exception):  # noqa: N818  (no error)
    """Leaves the loss at its call of the model, with the arguments."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call


class _CallRecorder(nn.Module):
    """Takes the place of the model, and raises the arguments of its call."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise _ModelCall((args, kwargs))


class _StoredOutput(nn.Module):
    """Takes the place of the model, and returns its computed output once."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []

    def forward(self, *_: Any, **__: Any) -> Any:
        if not self.outputs:
            raise InputError(
                "the workload's loss",
                "it calls the model more than once for a batch, which a pipeline computes once",
                "one call in each batch, or another strategy",
            )
        return self.outputs.pop()


def call_of(workload: Workload, batch: Batch) -> Call:
    """Return the arguments with which the loss of the batch calls the model."""
    try:
        workload.loss(_CallRecorder(), batch)
    except _ModelCall as caught:
        return caught.call
    raise InputError("the workload's loss", "it does not call the model", "one call of model(...)")


class Stage(nn.Module):
    """Consecutive parts of the model.  The first stage takes the number of a micro-batch."""

    def __init__(
        self,
        parts: Parts,
        *,
        around: Callable[[], AbstractContextManager[object]],
        call_of: Callable[[int], Call] | None,
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._around, self._call_of = around, call_of

    def forward(self, *received: Tensor) -> Any:
        with self._around():
            if self._call_of is None:
                return chained([*self.parts], *received)
            args, kwargs = self._call_of(int(received[0]))
            return chained([*self.parts], *args, **kwargs)


class _TimedStage(PipelineStage):
    """Marks the spans of backward passes, which the schedule calls."""

    spans: Callable[[], Spans]
    types: Sequence[torch.dtype]
    """Types of the tensors for which the next stage allocates buffers."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(*args, **kwargs)
        types = [tensor.dtype for tensor in (output if isinstance(output, tuple) else (output,))]
        if not self.is_last and types != self.types:
            kinds = " and ".join(str(dtype) for dtype in types)
            raise InputError(
                "recipe.precision",
                f"stage {self.stage_index} ends in {kinds} on this device, and on no CPU",
                "use fp32, or another number of stages",
            )
        return output

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with self.spans().span("backward"):
            return super().backward_maybe_with_nosync(*args, **kwargs)


class MetaStages:
    """Copy of the unsharded stages without data, from which shapes of their outputs are known.

    Activations are sharded by position over `sequence_ranks`.
    """

    def __init__(self, stages: Sequence[Parts], sequence_ranks: int = 1) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._sequence_ranks = sequence_ranks
        with FakeCopyMode(self._mode):
            self._stages = [list(parts) for parts in copy.deepcopy(stages)]

    def outputs(self, call: Call, recipe: Recipe) -> list[tuple[Tensor, ...]]:
        """Outputs of each stage for the call, without data."""
        outputs: list[tuple[Tensor, ...]] = []
        # Shapes and types on the host are those of every device.
        with self._mode, autocast(recipe, torch.device("cpu")):
            args, kwargs = tree_map_only(
                Tensor, lambda tensor: torch.empty_like(tensor, device="cpu"), call
            )
            for parts in self._stages:
                output = chained(parts, *args, **kwargs)
                args, kwargs = output if isinstance(output, tuple) else (output,), {}
                outputs.append(tuple(map(self._part, args)))
        return outputs

    def _part(self, activation: Tensor) -> Tensor:
        if self._sequence_ranks == 1 or not activation.requires_grad:
            return activation
        part = activation.chunk(self._sequence_ranks, dim=SEQUENCE_DIM)[0]
        return torch.empty_like(part, requires_grad=True)


def pipeline_sends(stages: Sequence[Parts], workload: Workload, ranks: int) -> dict[str, float]:
    """Fields of `ModelSize` about stages: bytes sent, tied parameters, and imbalance of the ranks.

    They are computed on a copy without data, in the precision of the parameters: residual sums
    widen activations that autocast narrows inside a block.
    """
    plan = BatchPlan(global_batch=1, seed=0)
    batch = next(iter(workload.batches(plan, Shard(index=0, count=1))))
    call = call_of(workload, batch)
    meta_parts = [nn.ModuleList(parts).to("meta") for parts in copy.deepcopy(stages)]
    sent = 0
    # Masks of transformers read values of meta tensors, but not of fake tensors.
    with FakeTensorMode(allow_non_fake_inputs=True):
        args, kwargs = tree_map_only(
            Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), call
        )
        for parts in meta_parts[:-1]:
            output = chained([*parts], *args, **kwargs)
            args, kwargs = output if isinstance(output, tuple) else (output,), {}
            sent += sum(tensor.nbytes * (2 if tensor.requires_grad else 1) for tensor in args)
    holders = Counter(p for parts in meta_parts for p in {*parts.parameters()} if p.requires_grad)
    tied = sum(parameter.numel() for parameter, count in holders.items() if count > 1)
    of_ranks = [[*chain(*meta_parts[rank::ranks])] for rank in range(ranks)]
    costs = [sum(map(_cost, parts)) for parts in of_ranks]
    sizes = [sum(p.numel() for p in nn.ModuleList(parts).parameters()) for parts in of_ranks]
    return {
        "between_stages_bytes": sent,
        "tied_parameters": tied,
        "stage_compute_imbalance": ranks * max(costs) / sum(costs) if sum(costs) else 1.0,
        "stage_parameter_imbalance": ranks * max(sizes) / max(1, sum(sizes)),
    }


@dataclass(kw_only=True, eq=False)
class PipelineWorker(DividedWorker):
    """Trains the stages of one rank; all ranks of its pipeline process the same samples.

    Parameters of other ranks' stages are removed from the model; parameter names stay the same.
    """

    stages: list[list[nn.Module]]
    """Parts of all stages; stages are assigned to the ranks in turn."""
    meta_stages: MetaStages
    pipeline: dist.ProcessGroup
    """Ranks of this pipeline."""
    pipelines: Sequence[Sequence[int]]
    """Ranks of every pipeline, in the order of stages."""
    schedule: str
    """Name of the class in `torch.distributed.pipelining`."""
    micro_batches: int
    replicate: Callable[[Stage], nn.Module] = lambda stage: stage
    """Wraps a stage to reduce its gradients over the ranks with other samples."""

    def __post_init__(self) -> None:
        ranks, rank = self.pipeline.size(), self.pipeline.rank()
        self._micro_batches: Sequence[Batch] = ()
        self._calls: dict[int, Call] = {}
        self._stored_output = _StoredOutput()
        self._spans: Spans = NoSpans()
        self._schedules: dict[object, Any] = {}
        self._between_stages_bytes = 0
        self._unsent_loss = torch.zeros(())
        """Loss of the step until it is sent to all stages; 0 except on the last stage."""
        first_names: dict[nn.Parameter, str] = {}
        self._names = {
            path: first_names.setdefault(parameter, path)
            for path, parameter in self.module.named_parameters(remove_duplicate=False)
        }
        """Names in the full model by the path of a parameter; a tied one has several paths."""
        holders = {
            name: sorted(
                {
                    index % ranks
                    for index, parts in enumerate(self.stages)
                    if any(parameter is p for part in parts for p in part.parameters())
                }
            )
            for parameter, name in first_names.items()
        }
        self._stage_indices = range(rank, len(self.stages), ranks)
        self._keep([part for index in self._stage_indices for part in self.stages[index]])
        self.module.to(self.device)
        self._counted = {name for name, held_by in holders.items() if held_by[0] == rank}
        """Parameters that this rank counts in norms; each counts on one rank."""
        self.modules = [
            self.replicate(
                Stage(
                    self.stages[index],
                    around=self._marked_forward,
                    call_of=self._call_of if index == 0 else None,
                )
            )
            for index in self._stage_indices
        ]
        super().__post_init__()
        shared = sorted({tuple(held_by) for held_by in holders.values() if len(held_by) > 1})
        groups = {held_by: self._group_of(held_by) for held_by in shared}
        self._tied = {
            name: groups[tuple(held_by)]
            for name, held_by in holders.items()
            if len(held_by) > 1 and rank in held_by and name in self._trained
        }

    def _keep(self, parts: Parts) -> None:
        """Remove all parameters outside of the parts, and other uses of tied parameters.

        A part may also use parameters that are registered in other modules of the model.
        """
        inside = {module for part in parts for module in part.modules()}
        used = {id(p) for module in inside for p in module.parameters(recurse=False)}
        modules = [*self.module.modules()]
        placed = {id(p) for m in modules if m in inside for p in m.parameters(recurse=False)}
        for module in modules:
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) not in used or (id(parameter) in placed and module not in inside):
                    module.register_parameter(name, None)

    def _group_of(self, places: Sequence[int]) -> Any:
        """Group of some ranks of this pipeline.  All ranks must call, as NCCL requires."""
        if len(places) == self.pipeline.size():
            return self.pipeline
        lines = ([line[place] for place in places] for line in self.pipelines)
        group, _ = dist.new_subgroups_by_enumeration([*lines])
        return group

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        paths = self.module.named_parameters(remove_duplicate=False)
        return iter({self._names[path]: parameter for path, parameter in paths}.items())

    @contextmanager
    def _marked_forward(self) -> Iterator[None]:
        with self._spans.span("forward"), self._precision():
            yield

    def _call_of(self, micro_batch: int) -> Call:
        if micro_batch not in self._calls:
            self._calls[micro_batch] = call_of(self.workload, self._micro_batches[micro_batch])
        return self._calls[micro_batch]

    def _loss_of(self, output: Any, micro_batch: Tensor) -> Tensor:
        batch = self._micro_batches[int(micro_batch)]
        self._stored_output.outputs[:] = [output]
        with self._marked_forward():
            loss = self.workload.loss(self._stored_output, batch)
            parts = self.recipe.gradient_accumulation * self.micro_batches
            return self._part_of_step(loss, batch, parts)

    def _forward_backward(self, batch: Batch, recorder: Spans) -> Tensor:
        """Run both passes of all micro-batches; return the loss, which only the last stage has."""
        self._spans = recorder
        losses: list[Tensor] = []
        with recorder.span("pipeline"):
            for part in batch.split(self.recipe.gradient_accumulation):
                losses += self._run_schedule(part.split(self.micro_batches))
            for name, group in self._tied.items():
                self._sum_up(self._trained[name], group)
        self._spans = NoSpans()
        losses = self._corrected(losses)
        self._weight_checked = True
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)

    def _correction(self) -> Tensor | None:
        """Broadcast the correction from the last stage, which alone has losses."""
        last = self.pipeline.size() - 1
        if not (self._weight_checked or self.workload.weights_known):
            adds = torch.tensor(float(self._adds_weights or False), device=self.device)
            dist.broadcast(adds, group=self.pipeline, group_src=last)
            self._adds_weights = bool(adds)
        if not self._adds_weights:
            return None
        factor = super()._correction()
        if factor is None:
            factor = torch.ones((), device=self.device)
        dist.broadcast(factor, group=self.pipeline, group_src=last)
        return factor

    def _send_loss(self, loss: Tensor) -> dist.Work | None:
        if self.recipe.gradient_clipping is not None:
            self._unsent_loss = loss  # is sent with the norm, to save a message
            return None
        last = self.pipeline.size() - 1
        return dist.broadcast(loss, group=self.pipeline, group_src=last, async_op=True)

    def _run_schedule(self, micro_batches: Sequence[Batch]) -> list[Tensor]:
        """Run the schedule once; return losses on the rank of the last stage."""
        self._micro_batches = micro_batches
        schedule = self._schedule_for(self._call_of(0))
        numbers = torch.arange(len(micro_batches))  # stages look micro-batches up by number
        losses: list[Tensor] = []
        try:
            schedule.step(
                *([numbers] if 0 in self._stage_indices else []),
                target=numbers if len(self.stages) - 1 in self._stage_indices else None,
                losses=losses,
                return_outputs=False,
            )
        except RuntimeError as error:
            raise error.__cause__ or error from None  # a stage wraps errors
        self._micro_batches = ()
        self._calls.clear()
        return [local_shard(loss).detach() for loss in losses]

    def _schedule_for(self, call: Call) -> Any:
        """Return the schedule for a size of micro-batch; every stage must know its input shapes.

        Shapes are computed without data, since a pass with data would advance random generators.
        """
        tensors = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor)]
        sizes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if sizes not in self._schedules:
            shapes = [
                (torch.zeros(1, dtype=torch.int64),),
                *self.meta_stages.outputs(call, self.recipe),
            ]
            samples = len(self._micro_batches[0])
            self._between_stages_bytes = sum(
                tensor.nbytes * (2 if tensor.requires_grad else 1) // samples
                for tensors in shapes[1:-1]
                for tensor in tensors
            )
            stages = []
            for index, module in zip(self._stage_indices, self.modules, strict=True):
                stage = _TimedStage(
                    module,
                    index,
                    len(self.stages),
                    self.device,
                    input_args=shapes[index],
                    output_args=shapes[index + 1],
                    group=self.pipeline,
                )
                stage.spans = lambda: self._spans
                stage.types = [tensor.dtype for tensor in shapes[index + 1]]
                stages.append(stage)
            made = getattr(pipelining, self.schedule)
            self._schedules[sizes] = made(
                stages if len(stages) > 1 else stages[0],
                n_microbatches=self.micro_batches,
                loss_fn=self._loss_of,
                scale_grads=False,
            )
        return self._schedules[sizes]

    @staticmethod
    def _sum_up(parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
        """Sum the gradients of a tied parameter over the stages that use it."""
        gradient = parameter.grad
        assert gradient is not None, "every place of a tied weight is used"
        dist.all_reduce(local_shard(gradient), group=group)

    def _clip(self, largest_norm: float) -> None:
        """Clip by the norm over all stages, which is sent together with the last stage's loss."""
        counted = [p for name, p in self._trained.items() if name in self._counted]
        both = torch.stack([total_norm(counted).square().to(self.device), self._unsent_loss])
        dist.all_reduce(both, group=self.pipeline)
        self._unsent_loss.copy_(both[1])
        clip(self._parameters, largest_norm, both[0].sqrt())

    def between_stages(self) -> Mapping[str, int]:
        return {
            "between_stages_bytes": self._between_stages_bytes,
            "tied_parameters": sum(self._trained[name].numel() for name in self._tied),
        }

    def each_parameter(self) -> Iterator[tuple[str, Tensor]]:
        return iter(sorted(self._merged(dict(super().each_parameter())).items()))

    def full_gradients(self) -> dict[str, Tensor]:
        return self._merged(super().full_gradients())

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        return self._merged(super().full_optimizer_state())

    def buffers(self) -> dict[str, Tensor]:
        """Buffers of all stages.  Collective over the pipeline."""
        ids = {id(b) for stage in self.modules for b in stage.buffers()}
        names = {n for n, buffer in self.module.named_buffers() if id(buffer) in ids}
        buffers = super().buffers()
        return buffers | self._merged({name: buffers[name] for name in names})

    def _merged(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Merge the mappings of all ranks of the pipeline.  Collective."""
        rank_values: list[Any] = [None] * self.pipeline.size()
        dist.all_gather_object(rank_values, dict(values), group=self.pipeline)
        return {name: value for part in reversed(rank_values) for name, value in part.items()}
