"""Libraries that only some features need, and the extras of the package that install them."""

from __future__ import annotations

import importlib.util

from shardmark.base.errors import InputError

SAME_NAMES = ("deepspeed", "mlflow", "ray", "tensorboard", "timm", "trackio", "wandb")
EXTRAS = {
    **dict(zip(SAME_NAMES, SAME_NAMES, strict=True)),
    **dict.fromkeys(("torchvision", "PIL"), "vision"),
    **dict.fromkeys(("transformers", "tokenizers", "safetensors"), "language"),
    "faster_coco_eval": "detection",
    "peft": "lora",
    "diffusers": "diffusion",
    "pyarrow": "parquet",
    "pandas": "tables",
    "vl_convert": "figures",
}
"""The extra of each optional module."""


def is_installed(module: str) -> bool:
    """Return whether an optional top-level module is installed, without importing it."""
    return importlib.util.find_spec(module) is not None


def install_command(module: str) -> str:
    """Return the command that installs an optional module with its extra."""
    return f"pip install 'shardmark[{EXTRAS[module]}]'"


def require(module: str, *, needed_for: str) -> None:
    """Raise `InputError` with the command that installs the module, unless it is installed.

    `needed_for` is the place of the message: an option, or a key of the experiment and its value.
    """
    if not is_installed(module):
        raise InputError(needed_for, f"{module} is not installed", install_command(module))
