"""The configuration of each strategy outside of Shardmark: wrapper, arguments and notes.

`export launch` writes it.  A strategy without an entry in `CONFIGURATIONS` cannot be exported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardmark.base.layout import Layout, Mesh
from shardmark.base.recipe import Recipe
from shardmark.ranks.strategies.base import Strategy, is_native
from shardmark.ranks.strategies.data_parallel import DataParallel
from shardmark.ranks.strategies.ddp import DDP, HOOKS
from shardmark.ranks.strategies.deepspeed.strategy import Zero
from shardmark.ranks.strategies.fsdp import FSDP
from shardmark.ranks.strategies.fsdp1.strategy import FullyShardedFirst
from shardmark.ranks.strategies.layers.strategies import AXES, SCHEDULES, Layered
from shardmark.ranks.strategies.layers.ulysses import Ulysses
from shardmark.ranks.strategies.single import Single
from shardmark.ranks.strategies.zro.strategy import SETTINGS, ZeroRedundancy

ACCELERATE_WRAPS = {
    "blocks": (
        "TRANSFORMER_BASED_WRAP",
        ("Accelerate takes the blocks' class as fsdp_transformer_layer_cls_to_wrap.",),
    ),
    "layers": ("SIZE_BASED_WRAP", ()),
    "root": ("NO_WRAP", ()),
}
"""Accelerate's name of each value of the option `wrap`, and what a user has to add there."""
FSDP_CASTS_NOTE = (
    "Batch norms computed with fp32 copies of their weights: PyTorch refuses 16-bit ones beside"
    " fp32 statistics. What the model returned became fp32."
)
FSDP_AUTOCAST_NOTE = (
    "Measured with fp32 parameters under torch.autocast: call it around your forward pass."
)
BF16_WEIGHTS_NOTE = (
    "Measured with bf16 weights: cast the parameters of your model, and its inputs, to bf16, and"
    " what it returns to fp32. Buffers, such as batch norm's statistics, stayed in fp32."
)
FSDP1_WRAP_NOTE = (
    "Wrap each repeated block by auto_wrap_policy; it is measured without mixed_precision."
)
ZERO_CASTS_NOTE = (
    "DeepSpeed casts parameters alone: cast your model's inputs too, and what it returns to fp32."
    " Batch norms computed with fp32 copies of their weights."
)
ZERO_SCALE_NOTE = (
    "DeepSpeed 0.19 does not lower torch_autocast's fp16 loss scale after an overflow. "
    "It skips every later step. Measured was a scale that falls."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfiguration:
    """A strategy in the terms of the user's own code and of other launchers' files."""

    wrapper: str | None = None
    """Dotted name of the callable that wraps the model; None if nothing does."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the wrapper as JSON values."""
    accelerate: Mapping[str, Any] | None = None
    """Keys of Accelerate's configuration file; None if Accelerate has no such strategy."""
    accelerate_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the wrapper under Accelerate, if Accelerate names them differently."""
    deepspeed: Mapping[str, Any] | None = None
    """DeepSpeed's configuration; None if the strategy is not DeepSpeed's."""
    example: str | None = None
    """The script of `examples/` that trains in this way; None if there is none."""
    importable: bool = False
    """True if `ranks/strategies/wrap.py` wraps a model in the same way."""
    notes: tuple[str, ...] = ()
    """Differences between what was measured and what a file can say."""
    accelerate_notes: tuple[str, ...] = ()
    """Notes about Accelerate's files alone."""


def launch_configuration(
    strategy: Strategy, recipe: Recipe, layout: Layout, device_type: str
) -> LaunchConfiguration | None:
    """Return how to train in the same way outside of Shardmark; None if nothing else can."""
    configure = next(
        (CONFIGURATIONS[base] for base in type(strategy).__mro__ if base in CONFIGURATIONS), None
    )
    if configure is None:
        return None
    configuration = configure(strategy, recipe, layout, device_type)
    if recipe.weights == "fp32":
        return configuration
    return replace(configuration, notes=(*configuration.notes, BF16_WEIGHTS_NOTE))


def _data_parallel(_: DataParallel, __: Recipe, layout: Layout, ___: str) -> LaunchConfiguration:
    return LaunchConfiguration(
        wrapper="torch.nn.DataParallel",
        arguments={"device_ids": list(range(layout.devices))},
        example="dp",
    )


def _ddp(strategy: DDP, *_: object) -> LaunchConfiguration:
    hook: dict[str, Any] = {}
    if strategy.compress == "powersgd":
        options = strategy.powersgd_options()
        hook = {"comm_hook": "power_sgd", "comm_state_option": options}
    elif strategy.compress != "none":
        hook = {"comm_hook": strategy.compress}
    return LaunchConfiguration(
        wrapper="torch.nn.parallel.DistributedDataParallel",
        arguments=strategy.arguments(),
        # For MULTI_CPU, which is for MPI, Accelerate's launcher starts a single process.
        accelerate={"distributed_type": "MULTI_GPU"},
        accelerate_arguments=strategy.arguments("broadcast_buffers") | hook,
        example="ddp",
        importable=strategy.compress == "none",
        notes=_compression_notes(strategy),
        accelerate_notes=(
            "Accelerate takes the wrapper's arguments as DistributedDataParallelKwargs.",
        ),
    )


def _compression_notes(strategy: DDP) -> tuple[str, ...]:
    """Note with the call by which the user's own code compresses gradients in the same way."""
    if strategy.compress == "none":
        return ()
    state, hook = "None", f"default_hooks.{strategy.compress}_compress_hook"
    if strategy.compress == "powersgd":
        options = (f"{key}={value}" for key, value in strategy.powersgd_options().items())
        state = f"powerSGD_hook.PowerSGDState(None, {', '.join(options)})"
        hook = "powerSGD_hook.powerSGD_hook"
    call = f"model.register_comm_hook({state}, {hook})"
    return (f"The wrapped model compresses by {call}, of {HOOKS}.",)


def _zero_redundancy(strategy: ZeroRedundancy, *_: object) -> LaunchConfiguration:
    arguments = ", ".join(f"{name}={value}" for name, value in SETTINGS.items())
    return LaunchConfiguration(
        wrapper="torch.nn.parallel.DistributedDataParallel",
        arguments=strategy.arguments(),
        example="zro",
        notes=(
            *_compression_notes(strategy),
            "Make the optimizer as torch.distributed.optim.ZeroRedundancyOptimizer(parameters,"
            f" optimizer_class=..., {arguments}, **its own arguments).",
        ),
    )


def _fsdp(strategy: FSDP, recipe: Recipe, layout: Layout, device_type: str) -> LaunchConfiguration:
    mesh = {"replicate": layout.data} if layout.data > 1 else {}
    mesh["shard"] = layout.shard
    wrap_policy, accelerate_notes = ACCELERATE_WRAPS[strategy.wrap]
    native = is_native(strategy.mixed_precision, recipe)
    fsdp_config: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": strategy.reshard_after_forward,
        "fsdp_auto_wrap_policy": wrap_policy,
        "fsdp_offload_params": recipe.cpu_offload,
        "fsdp_activation_checkpointing": bool(recipe.activation_checkpointing),
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    if strategy.wrap == "layers":
        fsdp_config["fsdp_min_num_params"] = 1
    accelerate: dict[str, Any] = {"distributed_type": "FSDP", "fsdp_config": fsdp_config}
    if layout.data > 1:
        accelerate["parallelism_config"] = {
            f"parallelism_config_dp_{name}_size": size for name, size in mesh.items()
        }
    accelerate_notes = (*accelerate_notes, *_accelerate_notes(strategy, recipe))
    notes: tuple[str, ...] = ()
    if native:
        notes = (FSDP_CASTS_NOTE,)
        reduced = f"Accelerate reduces gradients in {recipe.precision}; measured was fp32."
        accelerate_notes = (*accelerate_notes, reduced)
    elif recipe.precision != recipe.weights:
        notes = (FSDP_AUTOCAST_NOTE,)
        accelerate["mixed_precision"] = "no"  # Accelerate's would also cast parameters
    return LaunchConfiguration(
        wrapper="torch.distributed.fsdp.fully_shard",
        arguments={
            "mesh": mesh,
            "reshard_after_forward": strategy.reshard_after_forward,
            "offload_policy": "CPUOffloadPolicy" if recipe.cpu_offload else "OffloadPolicy",
            "mp_policy": {
                "param_dtype": recipe.precision if native else None,
                "reduce_dtype": recipe.weights,
            },
        },
        accelerate=_except_on_cpu(accelerate, device_type),
        example="fsdp",
        importable=True,
        notes=notes,
        accelerate_notes=accelerate_notes,
    )


def _accelerate_notes(strategy: FSDP | FullyShardedFirst, recipe: Recipe) -> tuple[str, ...]:
    """Return differences of Accelerate's training, and arguments that its file cannot have."""
    checkpointing = recipe.activation_checkpointing
    measured = f"measured was activation_checkpointing: {checkpointing}"
    notes = (
        []
        if isinstance(checkpointing, bool)
        else [f"Accelerate recomputes every block; {measured}."]
    )
    if strategy.reduce_each_pass:
        notes.append("Pass GradientAccumulationPlugin(sync_each_batch=True) to Accelerator.")
    return tuple(notes)


def _except_on_cpu(accelerate: Mapping[str, Any], device_type: str) -> Mapping[str, Any] | None:
    """Return None on a CPU, where Accelerate silently trains replicas, or each rank alone."""
    return None if device_type == "cpu" else accelerate


def _fsdp1(
    strategy: FullyShardedFirst, recipe: Recipe, _: Layout, device_type: str
) -> LaunchConfiguration:
    arguments = strategy.arguments()
    fsdp_config = {
        "fsdp_version": 1,
        "fsdp_sharding_strategy": arguments["sharding_strategy"],
        "fsdp_auto_wrap_policy": ACCELERATE_WRAPS[strategy.wrap][0],
        "fsdp_use_orig_params": True,
        "fsdp_sync_module_states": False,
        "fsdp_activation_checkpointing": bool(recipe.activation_checkpointing),
    }
    return LaunchConfiguration(
        wrapper="torch.distributed.fsdp.FullyShardedDataParallel",
        arguments=arguments,
        accelerate=_except_on_cpu(
            {"distributed_type": "FSDP", "mixed_precision": "no", "fsdp_config": fsdp_config},
            device_type,
        ),
        example="fsdp1",
        notes=(FSDP1_WRAP_NOTE,),
        accelerate_notes=_accelerate_notes(strategy, recipe),
    )


def _zero(strategy: Zero, recipe: Recipe, _: Layout, device_type: str) -> LaunchConfiguration:
    optimizer = "DeepSpeedCPUAdam" if strategy.cpu_adam else "your own optimizer"
    # All other keys are in DeepSpeed's file; Accelerate refuses them here as well.
    accelerate = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero3_init_flag": False}}
    return LaunchConfiguration(
        wrapper="deepspeed.initialize",
        accelerate=_except_on_cpu(accelerate, device_type),
        deepspeed=strategy.config(recipe, device_type),
        example="zero",
        notes=(
            f"Hand {optimizer} to deepspeed.initialize: the file names none.",
            *((ZERO_CASTS_NOTE,) if strategy.is_native(recipe) else ()),
            *((ZERO_SCALE_NOTE,) if strategy.scales_loss(recipe) else ()),
        ),
    )


def _layered(strategy: Layered, _: Recipe, layout: Layout, __: str) -> LaunchConfiguration:
    """Return how layers are split, stages are cut, and both are then wrapped by DDP or FSDP2."""
    sizes = {axis: getattr(layout, axis) for axis in AXES}
    arguments: dict[str, Any] = {"mesh": {n: size for n, size in sizes.items() if size > 1}}
    wrappers, notes = ["torch.distributed.fsdp.fully_shard"], list[str]()
    if layout.tensor > 1:
        wrappers.append("torch.distributed.tensor.parallel.parallelize_module")
        arguments |= strategy.plan_options()
        notes.append(
            "The plan divides a block's first layers by outputs (ColwiseParallel), its last"
            " ones and the embedding by inputs (RowwiseParallel). Tie tied weights again."
        )
    if layout.pipeline > 1:
        class_name, stages_of_rank = SCHEDULES[strategy.schedule]
        wrappers.append(f"torch.distributed.pipelining.{class_name}")
        count = strategy.num_microbatches(layout.pipeline)
        arguments |= {"n_microbatches": count, "scale_grads": False}
        notes.append(
            f"{stages_of_rank * layout.pipeline} PipelineStages of consecutive layers, equally"
            " many parameters in each, embeddings left out. Sum the gradients of tied weights"
            " over their stages, and clip by the norm of all stages together."
        )
    sharded = strategy.is_sharded(Mesh(data=layout.data, shard=layout.shard))
    if layout.shares > 1:
        wrapper = wrappers[0] if sharded else "DistributedDataParallel"
        modules = "Each stage" if layout.pipeline > 1 else "Blocks, then the model,"
        notes.append(f"{modules} is wrapped by {wrapper} over the ranks that have it.")
    has_example = sharded and layout.tensor > 1 and layout.pipeline == 1
    return LaunchConfiguration(
        wrapper=wrappers[-1],
        arguments=arguments,
        example="fsdp_tp" if has_example else None,
        notes=tuple(notes),
    )


def _ulysses(
    strategy: Ulysses, recipe: Recipe, layout: Layout, device_type: str
) -> LaunchConfiguration:
    reduction = strategy.reduction(Mesh(shard=layout.shard, sequence=layout.sequence))
    all_ranks = replace(layout, shard=layout.shard * layout.sequence, sequence=1)
    configuration = launch_configuration(reduction, recipe, all_ranks, device_type)
    assert configuration is not None, "DDP and FSDP2 have entries"
    return replace(
        configuration,
        accelerate=None,
        example=None,
        importable=False,
        notes=(
            f"{layout.sequence} neighbouring ranks load the same samples, and keep a part of"
            " every sequence, with its positions. Queries, keys and values become whole"
            " sequences of some heads by torch.distributed.all_to_all_single, and what"
            " attention gives goes back. Scale the loss so that the mean over all ranks is"
            " that of the step.",
        ),
    )


CONFIGURATIONS: dict[type[Any], Callable[..., LaunchConfiguration]] = {
    Single: lambda *_: LaunchConfiguration(accelerate={"distributed_type": "NO"}, example="single"),
    DataParallel: _data_parallel,
    DDP: _ddp,
    ZeroRedundancy: _zero_redundancy,
    FSDP: _fsdp,
    FullyShardedFirst: _fsdp1,
    Zero: _zero,
    Layered: _layered,
    Ulysses: _ulysses,
}
"""Configurations by class of strategy; a subclass has that of its nearest base class."""
