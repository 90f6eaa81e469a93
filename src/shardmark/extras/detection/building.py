"""Builds a detector by name, loads its weights, and fits its heads to the data's classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from shardmark.base.errors import DataError, InputError
from shardmark.extras.detection.options import PUBLISHED, RANDOM
from shardmark.ranks.workloads.model_building import construct, seeded, user_function
from shardmark.ranks.workloads.models import is_user_function
from shardmark.ranks.workloads.trained_weights import UNTRAINED, address, ensure, misfit, path, read

if TYPE_CHECKING:
    from shardmark.extras.detection.options import DetectionOptions

_BROKEN_FILE = (RuntimeError, OSError, EOFError, UnpicklingError)
"""Exceptions of torch for truncated files, and for files of another model."""

COCO_OUTPUTS = 91
"""Number of outputs: the background and COCO's category ids up to 90, ten of them unused."""

HEADS = (
    ("roi_heads.box_predictor.cls_score", False),
    ("roi_heads.box_predictor.bbox_pred", False),
    ("roi_heads.mask_predictor.mask_fcn_logits", False),
    ("head.classification_head.cls_logits", True),
)
"""Layers of torchvision's detectors with one output per class; true if classes are the inner axis
of the outputs (anchors, each with all classes), false if the outer (classes, each with 4 edges).
"""


def build_detector(options: DetectionOptions, *, classes: Sequence[str], seed: int) -> nn.Module:
    """Build a detector with the same fp32 weights in every process, on the CPU, in training mode.

    Raises `InputError` if the model cannot be built with these options, and `DataError` if a file
    of weights does not fit the model.
    """
    with seeded(seed):
        if options.weights is None:
            model = _construct(options, outputs=len(classes) + 1)
        elif options.weights == RANDOM:
            from torchvision.models import WeightsEnum

            trained = options.model_copy(update={"weights": "imagenet"})
            reads = patch.object(WeightsEnum, "get_state_dict")
            with reads, patch.object(nn.Module, "load_state_dict"):  # no file is read
                model = _construct(trained, outputs=len(classes) + 1)
        elif options.weights in PUBLISHED:
            model = _from_published(options, options.weights, classes)
        else:
            model = _from_file(options, Path(options.weights).expanduser(), classes)
    model.train()  # a user's method may return nothing
    return model


def _from_published(options: DetectionOptions, weights: str, classes: Sequence[str]) -> nn.Module:
    """Load torchvision's weights; torchvision itself would download them without being asked."""
    file = PUBLISHED[weights][options.model]
    ensure(file, download=options.download)
    try:
        if weights == "imagenet":
            return _construct(options, outputs=len(classes) + 1)
        model = _construct(options, outputs=None, weights="COCO_V1")
    except _BROKEN_FILE as error:
        raise DataError(
            str(path(file)), f"cannot be loaded ({error})", f"replace it with {address(file)}"
        ) from error
    fit_heads(model, coco_rows(classes))
    return model


def _construct(
    options: DetectionOptions, *, outputs: int | None, weights: str | None = None
) -> nn.Module:
    """Construct the model; `outputs` None takes the number of outputs of the weights."""
    constructor, arguments = _constructor(options, weights)
    sizes = {"min_size": options.min_size, "max_size": options.max_size}
    arguments |= {key: size for key, size in sizes.items() if size is not None}
    arguments |= options.model_options
    if outputs is not None:
        arguments["num_classes"] = outputs
    model = construct(options.model, constructor, arguments)
    if not is_user_function(options.model):
        _check_arguments(options, constructor, type(model))
    return model


def _check_arguments(
    options: DetectionOptions, constructor: Callable[..., object], model_class: type[nn.Module]
) -> None:
    """Raise `InputError` for options that torchvision's classes would silently ignore."""
    arguments = {*signature(constructor).parameters}
    for base in model_class.__mro__:
        names = signature(base).parameters
        if "num_classes" in names:  # a class of detectors, not `nn.Module`
            arguments.update(names)
    for key in options.model_options.keys() - arguments:
        nearest = get_close_matches(key, arguments, n=3) or sorted(
            arguments - {"kwargs", "options"}
        )
        raise InputError(
            f"workload.model_options.{key}",
            f"{options.model} has no such argument",
            f"nearest: {', '.join(nearest)}",
        )


def _constructor(
    options: DetectionOptions, weights: str | None
) -> tuple[Callable[..., object], dict[str, Any]]:
    if is_user_function(options.model):
        return user_function(options.model), {}
    from shardmark.extras.detection.own_detectors import OWN_DETECTORS

    backbone = "IMAGENET1K_V1" if options.weights == "imagenet" else None
    arguments: dict[str, Any] = {"weights_backbone": backbone}
    if backbone is not None or weights is not None:
        arguments["trainable_backbone_layers"] = options.trainable_backbone_layers
    if options.model in OWN_DETECTORS:
        return OWN_DETECTORS[options.model], arguments
    from torchvision.models import get_model_builder

    return get_model_builder(options.model), arguments | {"weights": weights}


def _from_file(options: DetectionOptions, file: Path, classes: Sequence[str]) -> nn.Module:
    """Load the user's state dictionary, with an output per class or with COCO's 91 outputs."""
    tensors = read(file)
    try:
        return _filled(_construct(options, outputs=len(classes) + 1), file, tensors)
    except DataError as misfit:
        if not any(f"{name}.bias" in tensors for name, _ in HEADS):
            raise
        try:
            model = _filled(_construct(options, outputs=COCO_OUTPUTS), file, tensors)
        except (DataError, InputError):
            raise misfit from None
    fit_heads(model, coco_rows(classes))
    return model


def _filled(model: nn.Module, file: Path, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Load the tensors; `DataError` if they do not fit."""
    try:
        missing, unknown = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        remedy = "choose another file or model"
        raise DataError(str(file), f"does not fit the model: {error}", remedy) from error
    missing = [name for name in missing if not name.endswith(UNTRAINED)]
    if missing or unknown:
        raise misfit(file, type(model).__name__, missing, unknown)
    return model


def coco_rows(classes: Sequence[str]) -> list[int | None]:
    """Index among COCO's 91 outputs of the background and each class; None if COCO lacks it."""
    from torchvision.models.detection import FasterRCNN_ResNet50_FPN_Weights

    names = FasterRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
    numbers = {name: number for number, name in enumerate(names) if name != "N/A"}
    return [0, *(numbers.get(name) for name in classes)]


def fit_heads(model: nn.Module, rows: Sequence[int | None]) -> None:
    """Select these of COCO's outputs, in this order; outputs without a source are initialised."""
    modules = dict(model.named_modules())
    new_rows = [index for index, row in enumerate(rows) if row is None]
    new_indices = torch.tensor(new_rows, dtype=torch.int64)
    selected = torch.tensor([row or 0 for row in rows])
    for name, inner in HEADS:
        layer = modules.get(name)
        if layer is None:
            continue
        assert isinstance(layer, nn.Linear | nn.Conv2d)
        assert layer.bias is not None
        per_class = len(layer.bias) // COCO_OUTPUTS  # anchors, a box's 4 edges, or 1
        # New classes of a one-stage detector start with the bias of its rarest class.
        bias = float(layer.bias.detach().min()) if inner else 0.0
        for attribute, mean, deviation in (("weight", 0.0, 0.01), ("bias", bias, 0.0)):
            old = getattr(layer, attribute).detach()
            sizes = (per_class, COCO_OUTPUTS) if inner else (COCO_OUTPUTS, per_class)
            new = old.unflatten(0, sizes).index_select(int(inner), selected)
            fresh = mean + deviation * torch.randn_like(new)
            fresh = fresh.index_select(int(inner), new_indices)
            new.index_copy_(int(inner), new_indices, fresh)
            setattr(layer, attribute, nn.Parameter(new.flatten(0, 1)))
        size = "out_features" if isinstance(layer, nn.Linear) else "out_channels"
        setattr(layer, size, len(rows) * per_class)
        if inner:
            modules[name.rpartition(".")[0]].num_classes = len(rows)
