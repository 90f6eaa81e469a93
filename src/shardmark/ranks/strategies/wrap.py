"""Wraps a model in the measured way: `from wrap import wrap`.  Needs torch and settings.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from shardmark.ranks.strategies.blocks import sharding_units

TYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def wrap(model: nn.Module, blocks: Iterable[nn.Module] | None = None) -> nn.Module:
    """Replicate the model by DDP, or shard it by FSDP2, with the arguments of settings.json.

    Call it after `init_process_group`, with the model on its device, and build the optimizer from
    the parameters of the returned model.  FSDP gathers each of `blocks` as a unit, by default the
    repeated parts.
    """
    settings = json.loads(Path(__file__).with_name("settings.json").read_text())
    arguments = settings["arguments"]
    if settings["wrapper"].endswith("DistributedDataParallel"):
        return DistributedDataParallel(model, **arguments)
    names = arguments["mesh"]
    mesh = init_device_mesh(settings["device"], (*names.values(),), mesh_dim_names=(*names,))
    dtypes = {key: TYPES[name] for key, name in arguments["mp_policy"].items()}
    policy = MixedPrecisionPolicy(dtypes["param_dtype"], dtypes["reduce_dtype"])
    offloads = arguments["offload_policy"] == "CPUOffloadPolicy"
    shard = partial(
        fully_shard,
        mesh=mesh,
        offload_policy=CPUOffloadPolicy() if offloads else OffloadPolicy(),
        reshard_after_forward=arguments["reshard_after_forward"],
    )
    for part in sharding_units(model, settings["options"].get("wrap", "blocks"), blocks):
        shard(part, mp_policy=policy)
    returned = torch.float32 if policy.param_dtype else None  # every loss is summed in fp32
    shard(model, mp_policy=replace(policy, output_dtype=returned))
    return model
