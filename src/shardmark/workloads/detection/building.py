"""Builds a detector by name.  Imports torch: `detectors` holds the names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from shardmark.core.errors import DataError, InputError
from shardmark.workloads.detection.heads import (
    COCO_OUTPUTS,
    coco_rows,
    fit_heads,
    head_outputs,
)
from shardmark.workloads.detection.own_detectors import OWN_DETECTORS
from shardmark.workloads.detection.weights import PUBLISHED, ensure
from shardmark.workloads.model_building import user_function
from shardmark.workloads.models import is_user_function

if TYPE_CHECKING:
    from shardmark.workloads.detection.options import DetectionOptions

_WRONG_OPTIONS = (TypeError, ValueError, AssertionError, KeyError)
"""What the libraries' constructors raise for arguments that they do not take."""

_BROKEN_FILE = (RuntimeError, OSError, EOFError, UnpicklingError)
"""What torch raises for files that are cut off, or of another model."""


def build_detector(options: DetectionOptions, *, classes: Sequence[str], seed: int) -> nn.Module:
    """The same fp32 weights wherever it is called, on the CPU, in training mode.

    Random weights come from torch's CPU generator, which is left as it was found.
    Raises `InputError` where the model cannot be built with these options, `DataError` where a
    file of weights does not fit it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
        model = _built(options, classes)
    return model.train()


def _built(options: DetectionOptions, classes: Sequence[str]) -> nn.Module:
    if options.weights is None:
        return _construct(options, outputs=len(classes) + 1)
    if options.weights in PUBLISHED:
        return _from_published(options, options.weights, classes)
    return _from_file(options, classes)


def _from_published(options: DetectionOptions, weights: str, classes: Sequence[str]) -> nn.Module:
    """torchvision's own file, which it would fetch unasked where it is not there."""
    file = PUBLISHED[weights](options.model)
    assert file is not None, "checked with the options"
    ensure(file, download=options.download)
    try:
        if weights == "imagenet":
            return _construct(options, outputs=len(classes) + 1)
        model = _construct(options, outputs=None, weights="COCO_V1")
    except _BROKEN_FILE as error:
        raise DataError(
            str(file.path), f"cannot be loaded ({error})", f"replace it by {file.address}"
        ) from error
    fit_heads(model, coco_rows(classes))
    return model


def _construct(
    options: DetectionOptions, *, outputs: int | None, weights: str | None = None
) -> nn.Module:
    """The model with so many outputs; None leaves their number to the trained weights."""
    constructor, arguments = _constructor(options, weights)
    sizes = {"min_size": options.min_size, "max_size": options.max_size}
    arguments |= {key: size for key, size in sizes.items() if size is not None}
    arguments |= options.model_options
    if outputs is not None:
        arguments["num_classes"] = outputs
    try:
        model = constructor(**arguments)
    except _WRONG_OPTIONS as error:
        listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise InputError(
            "workload.model_options",
            f"{options.model} cannot be built with {listed}: {error}",
            "use arguments that it takes",
        ) from error
    if not isinstance(model, nn.Module):
        found = f"{options.model} made a {type(model).__name__}"
        raise InputError("workload.model", found, "an nn.Module")
    if not is_user_function(options.model):
        _check_taken(options, constructor, type(model))
    return model


def _check_taken(
    options: DetectionOptions, constructor: Callable[..., object], made: type[nn.Module]
) -> None:
    """Raise `InputError` for options that torchvision's classes swallow without a word."""
    taken = {*signature(constructor).parameters}
    for kind in made.__mro__:
        names = signature(kind).parameters
        if "num_classes" in names:  # a detector that is built by name, not the base of all
            taken.update(names)
    for key in options.model_options.keys() - taken:
        nearest = get_close_matches(key, taken, n=3) or sorted(taken - {"kwargs", "options"})
        raise InputError(
            f"workload.model_options.{key}",
            f"{options.model} takes no such argument",
            f"nearest: {', '.join(nearest)}",
        )


def _constructor(
    options: DetectionOptions, weights: str | None
) -> tuple[Callable[..., object], dict[str, Any]]:
    if is_user_function(options.model):
        return user_function(options.model), {}
    backbone = "IMAGENET1K_V1" if options.weights == "imagenet" else None
    arguments: dict[str, Any] = {"weights_backbone": backbone}
    if backbone is not None or weights is not None:
        arguments["trainable_backbone_layers"] = options.trainable_backbone_layers
    if options.model in OWN_DETECTORS:
        return OWN_DETECTORS[options.model], arguments
    from torchvision.models import get_model_builder

    return get_model_builder(options.model), arguments | {"weights": weights}


@dataclass(frozen=True, slots=True)
class _Loaded:
    path: Path
    tensors: dict[str, torch.Tensor]


def _from_file(options: DetectionOptions, classes: Sequence[str]) -> nn.Module:
    """The user's state dictionary: of as many outputs as the data need, or of COCO's 91."""
    assert options.weights is not None, "the caller looked"
    loaded = _load(Path(options.weights).expanduser())
    outputs = len(classes) + 1
    model = _construct(options, outputs=outputs)
    if head_outputs(model, loaded.tensors) == COCO_OUTPUTS != outputs:
        model = _construct(options, outputs=COCO_OUTPUTS)
        _put(model, loaded)
        fit_heads(model, coco_rows(classes))
    else:
        _put(model, loaded)
    return model


def _load(path: Path) -> _Loaded:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a broken file makes torch raise
        raise DataError(
            str(path), f"cannot be read ({error})", "a state dictionary that torch.save wrote"
        ) from error
    tensors = found.get("model", found) if isinstance(found, dict) else found
    if not isinstance(tensors, dict) or not all(
        isinstance(value, torch.Tensor) for value in tensors.values()
    ):
        raise DataError(str(path), "holds no state dictionary", "name -> tensor, or it as `model`")
    return _Loaded(path, cast("dict[str, torch.Tensor]", tensors))


def _put(model: nn.Module, loaded: _Loaded) -> None:
    """Load the tensors; frozen batch norms, as torchvision trains detectors, count no batches."""
    try:
        missing, unknown = model.load_state_dict(loaded.tensors, strict=False)
    except RuntimeError as error:
        raise DataError(str(loaded.path), f"does not fit the model: {error}", "name another") from (
            error
        )
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]
    if missing or unknown:
        lacks = f"it lacks {len(missing)} tensors ({', '.join(missing[:3]) or 'none'})"
        more = f"has {len(unknown)} unknown ones ({', '.join(unknown[:3]) or 'none'})"
        raise DataError(
            str(loaded.path), f"does not fit {type(model).__name__}: {lacks} and {more}", "another"
        )
