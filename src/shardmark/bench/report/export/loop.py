"""A short training loop in which a strategy trains, beside the one of a single device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

_DOCSTRING = (
    "Trains a model of blocks in fp32; settings.json has precision, optimizer and the rest."
)
_SAVES = ("torch.save(model.state_dict(), path)",)
_RANK_0_SAVES = ("if dist.get_rank() == 0:", "    torch.save({state}, path)")
_SAMPLER = "sampler = DistributedSampler(dataset)"
_LOADER = "loader = DataLoader(dataset, batch_size=batch_size{}, {})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The parts of a loop in full precision, without evaluation; defaults train on one device."""

    imports: tuple[str, ...] = ()
    start: tuple[str, ...] = ("device = torch.device(device_type)",)
    model: tuple[str, ...] = ("model = model.to(device)",)
    optimizer: tuple[str, ...] = ("optimizer = torch.optim.SGD(model.parameters(), lr=rate)",)
    loader: tuple[str, ...] = (_LOADER.format("", "shuffle=True"),)
    epoch: tuple[str, ...] = ()
    step: tuple[str, ...] = (
        "loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))",
        "optimizer.zero_grad()",
        "loss.backward()",
        "optimizer.step()",
    )
    end: tuple[str, ...] = _SAVES

    @property
    def lines(self) -> tuple[str, ...]:
        return (
            *sorted(("import torch", *(line for line in self.imports if line[0] == "i"))),
            *sorted(
                (
                    "from torch import nn",
                    "from torch.utils.data import DataLoader",
                    *(line for line in self.imports if line[0] == "f"),
                )
            ),
            "",
            "",
            "def train(model, dataset, device_type, epochs, batch_size, rate, path):",
            *_indented(1, self.start, self.model, self.optimizer, self.loader),
            "    for epoch in range(epochs):",
            *_indented(2, self.epoch),
            "        for inputs, targets in loader:",
            *_indented(3, self.step),
            *_indented(1, self.end),
        )

    @property
    def code(self) -> str:
        """Return the content of `loop.py`."""
        return "\n".join((f'"""{_DOCSTRING}"""', "", *self.lines, ""))

    @property
    def changed_lines(self) -> int:
        """Number of lines that are added, changed or removed, compared with one device."""
        before, after = Loop().lines, self.lines
        matcher = SequenceMatcher(None, before, after, autojunk=False)
        return sum(
            max(old_end - old, new_end - new)
            for tag, old, old_end, new, new_end in matcher.get_opcodes()
            if tag != "equal"
        )


def _indented(depth: int, *parts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(" " * 4 * depth + line for part in parts for line in part)


_RANKS = Loop(
    imports=(
        "import os",
        "import torch.distributed as dist",
        "from torch.utils.data import DistributedSampler",
    ),
    start=(
        "dist.init_process_group()",
        *Loop().start,
        'torch.get_device_module(device_type).set_device(int(os.environ["LOCAL_RANK"]))',
    ),
    loader=(_SAMPLER, _LOADER.format(" // dist.get_world_size()", "sampler=sampler")),
    epoch=("sampler.set_epoch(epoch)",),
)
_CLOSES = ("dist.destroy_process_group()",)


def data_parallel_loop() -> Loop:
    return Loop(
        imports=("from torch.nn import DataParallel",),
        model=("model = DataParallel(model.to(device))",),
        end=("torch.save(model.module.state_dict(), path)",),
    )


def ddp_loop(arguments: Mapping[str, Any], *hooks: tuple[str, str]) -> Loop:
    """Return the loop of DDP; a hook is an import and a line below the wrapper."""
    wrapper = "from torch.nn.parallel import DistributedDataParallel"
    shown = "".join(f", {name}={value!r}" for name, value in arguments.items())
    saves = (line.format(state="model.module.state_dict()") for line in _RANK_0_SAVES)
    return replace(
        _RANKS,
        imports=(*_RANKS.imports, wrapper, *(imported for imported, _ in hooks)),
        model=(
            f"model = DistributedDataParallel(model.to(device){shown})",
            *(call for _, call in hooks),
        ),
        end=(*saves, *_CLOSES),
    )


def with_zero_redundancy(loop: Loop, arguments: str) -> Loop:
    """Return the loop with torch's ZeroRedundancyOptimizer and these arguments of it."""
    name = "ZeroRedundancyOptimizer"
    making = f"optimizer = {name}(model.parameters(), torch.optim.SGD, {arguments}, lr=rate)"
    imports = (*loop.imports, f"from torch.distributed.optim import {name}")
    return replace(loop, imports=imports, optimizer=(making,))


def sharded_loop(imports: tuple[str, ...], model: tuple[str, ...]) -> Loop:
    """Return the loop of torch's FSDP, whose first rank gathers the model that it saves."""
    options = "StateDictOptions, get_model_state_dict"
    state = "from torch.distributed.checkpoint.state_dict import " + options
    gathers = (
        "options = StateDictOptions(full_state_dict=True, cpu_offload=True)",
        "state = get_model_state_dict(model, options=options)",
    )
    saves = (line.format(state="state") for line in _RANK_0_SAVES)
    return replace(
        _RANKS,
        imports=(*_RANKS.imports, state, *imports),
        model=model,
        end=(*gathers, *saves, *_CLOSES),
    )


def fsdp_loop(mesh: Mapping[str, int], reshards: bool | int | None) -> Loop:
    """Return the loop of `fully_shard`, with a mesh if ranks replicate the shards of others."""
    imports: tuple[str, ...] = ("from torch.distributed.fsdp import fully_shard",)
    making: tuple[str, ...] = ()
    shown = f", reshard_after_forward={reshards!r}"
    if len(mesh) > 1:
        imports = (*imports, "from torch.distributed.device_mesh import init_device_mesh")
        sizes, names = tuple(mesh.values()), tuple(mesh)
        making = (f"mesh = init_device_mesh(device_type, {sizes}, mesh_dim_names={names})",)
        shown = f", mesh=mesh{shown}"
    shards = (
        "for block in model.children():",
        f"    fully_shard(block{shown})",
        f"fully_shard(model{shown})",
    )
    return sharded_loop(imports, (*Loop().model, *making, *shards))


def fsdp1_loop() -> Loop:
    return sharded_loop(
        (
            "from torch.distributed.fsdp import FullyShardedDataParallel",
            "from torch.distributed.fsdp.wrap import ModuleWrapPolicy",
        ),
        (
            "policy = ModuleWrapPolicy({type(block) for block in model.children()})",
            "model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device)",
        ),
    )


def deepspeed_loop() -> Loop:
    """Return the loop of DeepSpeed, whose engine reads `deepspeed.json` and moves the model."""
    starts = "model, *_ = deepspeed.initialize("
    return replace(
        _RANKS,
        imports=(*_RANKS.imports, "import deepspeed"),
        start=("deepspeed.init_distributed()", *_RANKS.start[1:]),
        model=(),
        optimizer=(
            *Loop().optimizer,
            f'{starts}model=model, optimizer=optimizer, config="deepspeed.json")',
        ),
        step=(Loop().step[0], "model.backward(loss)", "model.step()"),
        end=("model.save_16bit_model(os.path.dirname(path), os.path.basename(path))", *_CLOSES),
    )
