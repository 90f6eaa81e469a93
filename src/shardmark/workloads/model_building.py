"""Builds a classification model by name.  Imports torch: `models` holds the names."""

from __future__ import annotations

import hashlib
import importlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from weakref import WeakSet

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardmark.core.errors import InputError
from shardmark.workloads.models import is_user_function, registered_names

_WRONG_OPTIONS = (TypeError, ValueError, AssertionError, KeyError)
"""What the libraries' constructors raise for arguments that they do not take."""
_handed_out: WeakSet[nn.Module] = WeakSet()
"""Modules with tensors of their own, of all models that this process has built."""


def build_model(
    name: str, model_options: Mapping[str, Any], *, classes: int, image_size: int, seed: int
) -> nn.Module:
    """The same fp32 weights wherever it is called, on the CPU, in training mode.

    Raises `InputError` where the model cannot be built with these options.
    """
    constructor, own_options = _constructor(name, image_size)
    with seeded(seed):
        made = construct(name, constructor, own_options | {**model_options, "num_classes": classes})
    made.train()  # a user's method may return nothing
    return made


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's CPU generator begins with the seed, and is left as it was found."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
        yield


def seed_generators(seed: int, *, on_gpu: bool = False) -> None:
    """Seed the generators of torch, numpy and Python, from which data, models and losses draw.

    `torch.manual_seed` also queues the seed for every kind of accelerator that is not in use, with
    the text of the call stack: on a CPU that takes up to a millisecond, 500 times the seeding.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if on_gpu:
        torch.cuda.manual_seed_all(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Whatever draws inside leaves the generators of torch, numpy and Python as they were."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


@torch.no_grad()
def rounded_once(model: nn.Module, seed: int) -> nn.Module:
    """Move each element of the trained parameters to a neighbouring number of its type, or not.

    The seed decides.  Parameters without memory stay.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.is_meta or not parameter.requires_grad:
            continue
        numbers = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        ways = torch.randint(-1, 2, numbers.shape, generator=generator)
        target = torch.where(ways == 0, numbers, ways * torch.inf)
        numbers.copy_(torch.nextafter(numbers, target.to(numbers.dtype)))
    return model


def nonzero_parameters(model: nn.Module) -> dict[int, nn.Parameter]:
    """What `deepcopy` need not copy: parameters, which may be large, that a pass leaves alone.

    An embedding with `max_norm` scales its rows in place.  Matrices of zeros, as some layers begin
    with, would hide what is behind them: the copy gets others.
    """
    scaled = {
        id(p)
        for module in model.modules()
        if getattr(module, "max_norm", None) is not None
        for p in module.parameters(recurse=False)
    }
    shared = {id(p): p for p in model.parameters() if id(p) not in scaled}
    with seeded(0):
        for key, parameter in shared.items():
            if parameter.dim() > 1 and parameter.requires_grad and not parameter.any():
                shared[key] = nn.Parameter(0.02 * torch.randn_like(parameter))
    return shared


def construct(
    name: str, constructor: Callable[..., object], arguments: Mapping[str, Any]
) -> nn.Module:
    """Call it; `InputError` where it does not take the arguments, or makes something else."""
    try:
        model = constructor(**arguments)
    except _WRONG_OPTIONS as error:
        listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise InputError(
            "workload.model_options",
            f"{name} cannot be built with {listed}: {error}",
            "use arguments that it takes, and pictures of a size that it takes",
        ) from error
    if not isinstance(model, nn.Module):
        raise InputError("workload.model", f"{name} made a {type(model).__name__}", "an nn.Module")
    check_fresh(name, model)
    return model


def check_fresh(name: str, model: nn.Module) -> None:
    """Raise `InputError` for a model that was used before: ranks build it anew for each evaluation,
    and what shards or trains one must not change the next."""
    holders = [
        m for m in model.modules() if [*m.parameters(recurse=False), *m.buffers(recurse=False)]
    ]
    if any(module in _handed_out for module in holders):
        reason = "returned the same model, or a part of it, a second time"
    elif any(parameter.grad is not None for parameter in model.parameters()):
        reason = "returned a model that has gradients: it was trained before"
    elif any(map(is_lazy, model.parameters())):
        reason = "returned a model with lazy layers, whose sizes are not known yet"
    else:
        _handed_out.update(holders)
        return
    raise InputError("workload.model", f"{name} {reason}", "return a new, whole model each time")


def _constructor(name: str, image_size: int) -> tuple[Callable[..., object], dict[str, Any]]:
    """The function to call and the arguments that the data and the benchmark ask of it."""
    if is_user_function(name):
        return user_function(name), {}
    if name == "vit_cifar":
        return _vit_cifar, {"image_size": image_size}
    if not name.startswith("timm:") and name in registered_names("torchvision"):
        return _torchvision(name, image_size)
    return _timm(name.removeprefix("timm:"), image_size)


def _vit_cifar(**options: Any) -> nn.Module:
    from torchvision.models import VisionTransformer

    shape = {"patch_size": 4, "num_layers": 6, "num_heads": 4, "hidden_dim": 256, "mlp_dim": 512}
    return cast("nn.Module", VisionTransformer(**{**shape, **options}))


def _torchvision(name: str, image_size: int) -> tuple[Callable[..., object], dict[str, Any]]:
    from torchvision.models import get_model_builder

    options: dict[str, Any] = {"weights": None}
    if name.startswith("vit_"):
        options["image_size"] = image_size
    elif name.startswith("maxvit"):
        options["input_size"] = (image_size, image_size)
    elif name in ("inception_v3", "googlenet"):
        # Without the auxiliary heads the model returns one tensor, in training too.
        options |= {"aux_logits": False, "init_weights": True}
    return get_model_builder(name), options


def _timm(name: str, image_size: int) -> tuple[Callable[..., object], dict[str, Any]]:
    try:
        import timm
    except ImportError as error:
        raise InputError(
            "workload.model", f"{name} is a model of timm, which is missing", "pip install timm"
        ) from error
    options: dict[str, Any] = {"model_name": name, "pretrained": False}
    config = timm.get_pretrained_cfg(name)
    if config is not None and config.fixed_input_size:
        options["img_size"] = image_size
    return timm.create_model, options


def user_function(name: str, key: str = "workload.model") -> Callable[..., object]:
    """`package.module:function`, found from the current folder, too; or `file.py:function`."""
    module_name, _, function_name = name.rpartition(":")
    file = Path(module_name).expanduser().absolute() if module_name.endswith(".py") else None
    folder = str(Path.cwd() if file is None else file.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name) if file is None else _from_file(file)
        function = getattr(module, function_name)
    except (ImportError, AttributeError, OSError) as error:
        raise InputError(
            key, f"cannot import {name}: {error}", "package.module:function"
        ) from error
    if not callable(function):
        raise InputError(key, f"{name} is not callable", "a function or a class")
    return cast("Callable[..., object]", function)


def _from_file(file: Path) -> ModuleType:
    """The file as a module of its own, whatever else has its name."""
    # Another folder may hold a file of the same name.
    name = f"shardmark_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None, "a file of Python has a loader"
        module = module_from_spec(spec)
        sys.modules[name] = module  # as `import` does: data classes look themselves up there
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
