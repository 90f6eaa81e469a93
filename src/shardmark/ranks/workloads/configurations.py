"""Sizes of well-known models of transformers and diffusers, and configurations in files.

Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

PREFIX = "hf:"
CLASS = "_class_name"
"""Key of a configuration of diffusers: the class of the model."""
NOISE_MODELS = {
    "UNet2DConditionModel": 77,
    "DiTTransformer2DModel": 0,
    "PixArtTransformer2DModel": 120,
    "SD3Transformer2DModel": 77 + 256,
    "FluxTransformer2DModel": 512,
}
"""Classes of diffusers that predict the noise in an image, and the tokens of text beside it, by
CLIP, T5 or both."""
LATENT_PIXELS = 8
"""Pixels of an image for each of its latents, along a side."""
LATENT_SIZE = 128
"""Latents along a side for a model that has no size: images of 1024 pixels."""


@cache
def shipped() -> Mapping[str, Mapping[str, Any]]:
    """Return `source`, `parameters` and `configuration` of each model in `configurations.json`.

    `configuration` has sizes only: other keys have the defaults of the library.  `parameters` is
    the published number of different parameters.
    """
    content = files("shardmark.ranks.workloads").joinpath("configurations.json").read_bytes()
    loaded: dict[str, Mapping[str, Any]] = json.loads(content)
    return loaded


def span_corruption_targets(input_tokens: int) -> int:
    """Tokens of T5's targets for so many of its input, sentinels and the end included.

    Spans of three tokens, 15 % of all, are replaced by a sentinel each.  Source: Raffel and
    others, J. Machine Learning Research 21 (2020), section 3.1.4.
    """
    noise = round(0.15 * (input_tokens - 1) / 0.9)
    return noise + round(noise / 3) + 1


def stored_configuration(model: str) -> Mapping[str, Any] | None:
    """Return the configuration of `hf:FOLDER`, `hf:FILE.json` or `hf:NAME`; None for other names.

    A file takes precedence over a name.  Raises `OSError` for a file that cannot be read and
    `ValueError` for one that is not a JSON object.
    """
    name = model.removeprefix(PREFIX)
    path = Path(name).expanduser()
    if not model.startswith(PREFIX):
        return None
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        return shipped()[name]["configuration"] if name in shipped() else None
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a configuration: it has no keys")
    return content
