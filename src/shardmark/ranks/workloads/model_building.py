"""Builds a model by name or from the user's function.  Imports torch; `models` has the names."""

from __future__ import annotations

import hashlib
import importlib
import logging
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardmark.base.errors import InputError, ShardmarkError
from shardmark.base.recipe import Weights
from shardmark.ranks.workloads.models import SMALL_VITS, is_user_function, registered_names

if TYPE_CHECKING:
    from shardmark.ranks.workloads.base import Workload

logger = logging.getLogger(__name__)

_WRONG_OPTIONS = (TypeError, ValueError, AssertionError, KeyError)
"""Exceptions that constructors of models raise for wrong arguments."""
_handed_out: WeakSet[nn.Module] = WeakSet()
"""Modules with tensors of their own, from all models that this process has built."""


def build_model(
    name: str, model_options: Mapping[str, Any], *, classes: int, image_size: int, seed: int
) -> nn.Module:
    """Build the model with the same fp32 weights in every process, on the CPU, in training mode.

    Raises `InputError` if the model cannot be built with these options.
    """
    constructor, required = _constructor(name, image_size)
    with seeded(seed):
        model = construct(name, constructor, required | {**model_options, "num_classes": classes})
    model.train()  # a user's method may return nothing
    return model


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator inside the block, and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
        yield


def seed_generators(seed: int, *, on_gpu: bool = False) -> None:
    """Seed the generators of torch, numpy and Python, from which data, models and losses draw.

    `torch.manual_seed` also queues the seed for every accelerator that is not in use, with the text
    of the call stack.  That takes up to a millisecond on a CPU, 500 times as long as seeding.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if on_gpu:
        torch.cuda.manual_seed_all(seed)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the random state of torch, numpy and Python after the block."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


@torch.no_grad()
def perturb_by_rounding(model: nn.Module, seed: int, weights: Weights = "fp32") -> nn.Module:
    """Change each element of the trained parameters by one rounding step up, down or not at all.

    The seed decides.  With `weights: bf16` the step is that of bf16, in which fp32 parameters then
    have their values.  Parameters on the meta device are unchanged.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.is_meta or not parameter.requires_grad:
            continue
        numbers = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        directions = torch.randint(-1, 2, numbers.shape, generator=generator)
        rounded = numbers
        if weights == "bf16" and numbers.dtype is torch.float32:
            rounded = numbers.to(torch.bfloat16)
        target = torch.where(directions == 0, rounded, directions * torch.inf)
        numbers.copy_(torch.nextafter(rounded, target.to(rounded.dtype)))
    return model


def build_on_meta(workload: Workload) -> nn.Module | None:
    """Build the model with its parameters on the meta device; return None if that fails.

    Raises the `ShardmarkError` of a model that its workload refuses.
    """
    try:
        with _parameters_on_meta():
            return workload.build_model()
    except ShardmarkError:
        raise
    except Exception as error:  # a constructor may read its weights
        logger.info("the model cannot be built without its weights: %s", error)
        return None


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Replace every parameter by one on the meta device when a module registers it.

    Tensors of more than 1 GiB, such as those of all experts of a layer, begin there.
    """
    register = nn.Module.register_parameter
    makers = {name: getattr(torch, name) for name in ("empty", "ones", "zeros")}

    def on_meta_if_large(make: Callable[..., torch.Tensor], *size: Any, **options: Any) -> Any:
        on_meta = make(*size, **(options | {"device": "meta"}))
        return on_meta if on_meta.nbytes > 2**30 else make(*size, **options)

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    vars(torch).update({name: partial(on_meta_if_large, make) for name, make in makers.items()})
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        vars(torch).update(makers)


def nonzero_parameters(model: nn.Module) -> dict[int, nn.Parameter]:
    """A `deepcopy` memo of parameters to share with a copy of the model, and not to copy.

    Embeddings with `max_norm` are copied, since a forward pass changes them.  Matrices of zeros,
    with which some layers are initialised, would hide the layers before them: they are replaced.
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
    """Call the constructor; `InputError` if it rejects the arguments or returns no module."""
    try:
        model = constructor(**arguments)
    except _WRONG_OPTIONS as error:
        listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise InputError(
            "workload.model_options",
            f"{name} cannot be built with {listed}: {error}",
            "use arguments that it takes, and images of a size that it takes",
        ) from error
    if not isinstance(model, nn.Module):
        raise InputError("workload.model", f"{name} made a {type(model).__name__}", "an nn.Module")
    check_fresh(name, model)
    return model


def check_fresh(name: str, model: nn.Module) -> None:
    """Raise `InputError` for a model that was used before.

    Ranks build the model again for each evaluation, and sharding or training one copy must not
    change the next.
    """
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
    raise InputError("workload.model", f"{name} {reason}", "return a new model from every call")


def _constructor(name: str, image_size: int) -> tuple[Callable[..., object], dict[str, Any]]:
    """The function to call, and the arguments that the data and the benchmark require."""
    if is_user_function(name):
        return user_function(name), {}
    if name in SMALL_VITS:
        return partial(_small_vit, **SMALL_VITS[name]), {"image_size": image_size}
    if not name.startswith("timm:") and name in registered_names("torchvision"):
        return _torchvision(name, image_size)
    return _timm(name.removeprefix("timm:"), image_size)


def _small_vit(**options: Any) -> nn.Module:
    from torchvision.models import VisionTransformer

    return cast("nn.Module", VisionTransformer(**{"patch_size": 4, "num_heads": 4, **options}))


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
    import timm

    options: dict[str, Any] = {"model_name": name, "pretrained": False}
    config = timm.get_pretrained_cfg(name)
    if config is not None and config.fixed_input_size:
        options["img_size"] = image_size
    return timm.create_model, options


def user_function(name: str, key: str = "workload.model") -> Callable[..., object]:
    """Import `package.module:function`, also from the current folder, or `file.py:function`."""
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
    """Import the file under a name of its own: another folder may have a file of that name."""
    name = f"shardmark_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None, "a file of Python has a loader"
        module = module_from_spec(spec)
        sys.modules[name] = module  # like `import`: dataclasses look themselves up there
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
