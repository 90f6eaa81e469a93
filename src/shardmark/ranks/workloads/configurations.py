"""Sizes of well-known models of transformers and diffusers, and configurations in files.

Imports no torch.
"""

from __future__ import annotations

import json
import re
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
    "Flux2Transformer2DModel": 512,
    "QwenImageTransformer2DModel": 512,
    "WanTransformer3DModel": 512,
}
"""Classes of diffusers that predict the noise in an image, and the tokens of text beside it, by
CLIP, T5 or a language model."""
FRAMES = {"WanTransformer3DModel": 81}
"""Images in a sample of the classes that predict the noise in a video."""
VARIANTS = (
    (r"^(.*/)?(meta-(?=llama))?", ""),  # the owner
    (r"[_ :]+", "-"),
    (r"-(unsloth|bnb|gguf|awq|gptq|mlx|qat|dynamic|dwq|hqq|exl2|ggml|onnx|diffusers)\b", ""),
    (
        r"-(nvfp4|mxfp4|fp8|bf16|fp16|int[48]|(quantized\.)?w\d+a\d+|[2-8]-?bit|q\d(-[k01])?(-[sml])?)\b",
        "",
    ),
    (r"-(instruct|it|pt|chat|hf|coder|math|think(?:ing)?|reasoning|sft|dpo|preview|latest)\b", ""),
    (r"(?<=\d[bm])-base\b|-base(?=-\d{4}\b|$)|-(\d+k|1m)\b|-v[01](\.\d+)+$|\.en$|-deduped$", ""),
    (r"-(20\d\d-\d\d-\d\d|\d{6}|\d{4})\b", ""),  # a release's date
)
"""Patterns, and their replacements, of what a copy's name in lower case has beside the name of the
sizes: first another spelling, then what marks quantized, tuned and later copies."""
SPELLING = 2
"""Number of the patterns that no two names differ in."""
JOINED = (r"(?<=[a-z])-(?=\d)", "")
"""The same of `llama-3` and `llama3`, after all others."""
LATENT_PIXELS = 8
"""Pixels of an image for each of its latents, along a side."""
LATENT_SIZE = 128
"""Latents along a side for a model that has no size: images of 1024 pixels."""

TEXT_TO_TEXT = ("bart", "m2m_100", "marian", "mbart", "pegasus", "t5")
"""Model types of transformers that encode a text and decode another one."""
SOUND = ("hubert", "wav2vec2")
"""Model types of transformers that write down what is said."""
CONTRASTIVE = ("clip", "siglip")
"""Model types that compare images with texts."""
CLASSES: Mapping[str, str] = {
    **dict.fromkeys((*CONTRASTIVE, "dinov3_vit"), "AutoModel"),
    **dict.fromkeys(("dinov2", "vit"), "AutoModelForImageClassification"),
    **dict.fromkeys(("d_fine", "rt_detr", "rt_detr_v2"), "AutoModelForObjectDetection"),
    **dict.fromkeys(SOUND, "AutoModelForCTC"),
    **dict.fromkeys(TEXT_TO_TEXT, "AutoModelForSeq2SeqLM"),
    "whisper": "AutoModelForSpeechSeq2Seq",
}
"""Class of transformers by the type of a model that models no language, or has an encoder as well.
It computes the loss, but that of DINOv3 and of sound, whose loss is a mean of the outputs."""
SOUND_SECONDS = 10
"""Length of their samples."""


@cache
def shipped() -> Mapping[str, Mapping[str, Any]]:
    """Return `source`, `parameters` and `configuration` of each model in `configurations.json`.

    `configuration` has sizes only: other keys have the defaults of the library.  `parameters` is
    the published number of different parameters.  `copies`, where there, are names of other models
    of the same sizes.
    """
    content = files("shardmark.ranks.workloads").joinpath("configurations.json").read_bytes()
    loaded: dict[str, Mapping[str, Any]] = json.loads(content)
    return loaded


def shipped_name(name: str) -> str | None:
    """Return the shipped model that has the sizes of a name as people write it, or None.

    As few patterns as possible are removed until the name is that of one model.
    """
    if name in shipped():
        return name
    for count in range(SPELLING, len(VARIANTS) + 1):
        models = {model for plain, model in _plain_names(count) if plain == _plain(name, count)}
        if models:
            return models.pop() if len(models) == 1 else None
    return None


@cache
def _plain_names(count: int) -> tuple[tuple[str, str], ...]:
    """Return the plain spelling of each shipped model and of its copies, and the model's name."""
    return tuple(
        (_plain(spelling, count), model)
        for model, entry in shipped().items()
        for spelling in (model, *entry.get("copies", ()))
    )


def _plain(name: str, count: int) -> str:
    """Return the name in lower case without what the first patterns find."""
    name = name.lower()
    for pattern, replacement in (*VARIANTS[:count], JOINED):
        name = re.sub(pattern, replacement, name)
    return name


def text_sizes(configuration: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration that describes the text, where it describes images."""
    sizes: Mapping[str, Any] = configuration.get("text_config", configuration)
    return sizes


def target_tokens(model_type: str, input_tokens: int) -> int:
    """Tokens of the text that is decoded for so many that are encoded: as many, but for T5.

    T5 replaces spans of three tokens, 15 % of all, by a sentinel each, and decodes them, the
    sentinels and the end.  Source: Raffel and others, J. Machine Learning Research 21 (2020),
    section 3.1.4.
    """
    if model_type != "t5":
        return input_tokens
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
