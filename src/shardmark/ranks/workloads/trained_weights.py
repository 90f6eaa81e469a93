"""Files of trained weights: torch's cache of published ones, and state dictionaries of the user."""

from __future__ import annotations

import os
import re
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING

from shardmark.base.errors import DataError, InputError
from shardmark.base.system.extras import require

if TYPE_CHECKING:
    from torch import Tensor, nn

OLD_NAMES = re.compile(r"(denselayer\d+\.(?:norm|conv))\.(\d+)\.")
"""Names of layers in the published files of DenseNet, which torchvision has renamed."""
AUXILIARY = ("AuxLogits.", "aux1.", "aux2.")
"""Beginnings of names of layers that Inception and GoogLeNet have only in pretraining."""
UNTRAINED = "num_batches_tracked"
"""End of names that may be missing, as in frozen batch norms."""


def address(name: str) -> str:
    """URL of published weights by their NAME-HASH."""
    return f"https://download.pytorch.org/models/{name}.pth"


def path(name: str) -> Path:
    """Path of published weights in torch's cache (`torch.hub.get_dir`)."""
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    home = Path(os.environ.get("TORCH_HOME") or cache_folder / "torch").expanduser()
    return home / "hub" / "checkpoints" / f"{name}.pth"


def ensure(name: str, *, download: bool) -> Path:
    """Return the file, downloaded if it is missing; `DataError` with URL and path if that fails."""
    file = path(name)
    if file.is_file():
        return file
    remedy = f"save {address(name)} as {file}, or set workload.weights to your own file"
    if not download:
        raise DataError(
            str(file), "is missing, and workload.download is false", f"set it to true; or {remedy}"
        )
    from torch.hub import download_url_to_file

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        digits = name.rpartition("-")[2]
        download_url_to_file(address(name), str(file), hash_prefix=digits, progress=False)
    except (OSError, HTTPException, ValueError, RuntimeError) as error:
        raise DataError(
            str(file), f"is missing and could not be downloaded ({error})", remedy
        ) from error
    return file


def check_file(weights: str, allowed: str) -> None:
    """Raise `DataError` if the user's file does not exist, and `InputError` without its reader."""
    if not Path(weights).expanduser().is_file():
        reason = f"no such file: {weights}"
        raise DataError("workload.weights", reason, f"use {allowed}")
    if weights.endswith(".safetensors"):
        require("safetensors", needed_for=f"workload.weights {weights}")


def read(file: Path) -> dict[str, Tensor]:
    """Read a state dictionary that `torch.save` or safetensors has written, on the CPU."""
    import torch
    from torch import Tensor

    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            content: object = load_file(file)
        else:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the libraries raise many types for broken files
        remedy = "use a state dictionary written by torch.save, or by safetensors as .safetensors"
        raise DataError(str(file), f"cannot be read ({error})", remedy) from error
    for key in ("model", "state_dict"):
        content = content.get(key, content) if isinstance(content, dict) else content
    if not isinstance(content, dict) or not all(
        isinstance(value, Tensor) for value in content.values()
    ):
        remedy = "store a dictionary of tensors, or one under the key `model` or `state_dict`"
        raise DataError(str(file), "has no state dictionary", remedy)
    return content


def fill_classifier(model: nn.Module, file: Path, *, classes: int) -> tuple[str, ...]:
    """Load all weights of the file except for layers with other numbers of classes.

    Returns the names of the tensors that keep their initial values.  Raises `DataError` for a file
    of another model.  Parameters on the meta device are only checked.
    """
    import torch

    tensors = {OLD_NAMES.sub(r"\1\2.", name): value for name, value in read(file).items()}
    targets = model.state_dict()
    missing = [n for n in targets if n not in tensors and not n.endswith(UNTRAINED)]
    unknown = [n for n in tensors if n not in targets and not n.startswith(AUXILIARY)]
    if missing or unknown:
        raise misfit(file, type(model).__name__, missing, unknown)
    initial = []
    with torch.no_grad():
        for name, target in targets.items():
            value = tensors.get(name, target)
            if value.shape == target.shape:
                target.copy_(value)
            elif target.shape[:1] == (classes,) and value.shape[1:] == target.shape[1:]:
                initial.append(name)
            else:
                shapes = f"{tuple(value.shape)}, and the model's {tuple(target.shape)}"
                reason = f"does not fit {type(model).__name__}: the shape of its {name} is {shapes}"
                remedy = "choose another file or model, or the workload.image_size of the file"
                raise DataError(str(file), reason, remedy)
    return tuple(initial)


def misfit(file: Path, model: str, missing: list[str], unknown: list[str]) -> DataError:
    """The error for a file whose tensors have other names than the model's."""
    problem = (
        f"does not fit {model}: it lacks {len(missing)} tensors"
        f" ({', '.join(missing[:3]) or 'none'}) and has {len(unknown)} unknown ones"
        f" ({', '.join(unknown[:3]) or 'none'})"
    )
    return DataError(str(file), problem, "choose another file or model")


def published_classifier(model: str) -> str:
    """Return the NAME-HASH of torchvision's default weights of a classifier.

    Raises `InputError` for a model without any.  Imports torch.
    """
    from torchvision.models import get_model_weights

    try:
        published = get_model_weights(model)
    except ValueError:  # no model of torchvision
        published = None
    if published is None or not hasattr(published, "DEFAULT"):
        reason = f"default, and torchvision has no weights of {model}"
        raise InputError("workload.weights", reason, "use null or a file")
    return Path(str(published.DEFAULT.url)).stem
