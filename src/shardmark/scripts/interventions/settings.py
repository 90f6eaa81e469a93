"""Settings of modules, of torch and of the C library that may save time."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardmark.scripts.interventions.base import Intervention, replace

M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD = -4, -1, -2
"""Numbers of glibc's malloc.h."""


class NoSync(Intervention):
    """DDP reduces in the last backward pass of a step alone; the value is their number."""

    def install(self) -> None:
        passes = [0]

        def forward(original: Any, module: Any, *inputs: Any, **more: Any) -> Any:
            if torch.is_grad_enabled() and module.training:
                passes[0] += 1
                module.require_backward_grad_sync = passes[0] >= int(self.value)
            return original(module, *inputs, **more)

        def stepped(*_: Any) -> None:
            passes[0] = 0

        replace(DistributedDataParallel, "forward", forward)
        register_optimizer_step_post_hook(stepped)


class Compile(Intervention):
    """Compiles the first module that trains, without DDP, by the backend that the value says."""

    def install(self) -> None:
        backend, audited = self.value or "inductor", not hasattr(self, "place")
        compiled = torch.compile  # without the audit's hook
        if audited:  # as the uncompiled model draws and rounds
            from torch._inductor import config

            config.fallback_random = config.emulate_precision_casts = True

        def call(original: Any, module: nn.Module, *inputs: Any, **more: Any) -> Any:
            trains = any(parameter.requires_grad for parameter in module.parameters())
            trains &= module.training and torch.is_grad_enabled()
            if trains and not isinstance(module, DistributedDataParallel):
                nn.Module.__call__ = original  # type: ignore[method-assign]
                if audited:  # hooks see the call itself
                    module.forward = compiled(module.forward, backend=backend)
                else:
                    module.compile(backend=backend)
            return original(module, *inputs, **more)

        replace(nn.Module, "__call__", call)


class ChannelsLast(Intervention):
    """Convolutions of images have their channels last, and give them to what follows."""

    def install(self) -> None:
        def create(original: Any, module: nn.Conv2d, *arguments: Any, **keywords: Any) -> None:
            original(module, *arguments, **keywords)
            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)

        replace(nn.Conv2d, "__init__", create)


class Tf32(Intervention):
    def install(self) -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


class Threads(Intervention):
    """torch computes in as many threads of a rank as the value says."""

    def install(self) -> None:
        torch.set_num_threads(int(self.value))


class CudnnBenchmark(Intervention):
    def install(self) -> None:
        torch.backends.cudnn.benchmark = True


class Malloc(Intervention):
    """The C library keeps memory that is freed, in place of giving it back to the kernel."""

    def install(self) -> None:
        library = ctypes.CDLL(None)
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**30), (M_TOP_PAD, 2**26)):
            library.mallopt(option, value)
