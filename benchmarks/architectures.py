"""Profiles of well-known models by formulas: users' own are traced, published ones cannot be.

Multiplications and activations of picture models are those of their papers and of timm's tables;
stages are shares of parameters and of work, first layers first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from shardmark.core.traffic import ModelSize
from shardmark.predict.profile import Amount, Operation, Profile, Unit

EVEN = ((1 / 8, 1 / 8),) * 8
RESNET = ((0.01, 0.20), (0.05, 0.25), (0.28, 0.33), (0.58, 0.21), (0.08, 0.01))
ACCESSES = 6
"""Of an activation in a forward pass: a convolution's write and read, and twice those of norm and
activation function."""


@dataclass(frozen=True, slots=True)
class Pictures:
    """A network of convolutions at its usual resolution."""

    pattern: str
    million_parameters: float
    giga_products: float
    """Multiplications of a picture's forward pass, 10^9."""
    million_activations: float
    """Outputs of convolutions."""
    stages: tuple[tuple[float, float], ...] = EVEN


@dataclass(frozen=True, slots=True)
class Text:
    """A transformer."""

    pattern: str
    layers: int
    width: int
    million_parameters: float | None = None
    sequence: int | None = None
    """Tokens of a sample where the source does not say."""


PICTURES = (
    Pictures(r"mask.?r-?cnn|keypoint", 44.4, 134, 330),
    Pictures(r"faster.?r-?cnn|retinanet|cascade", 41.8, 134, 330),
    Pictures(r"ssd300", 22.9, 13, 40),
    Pictures(r"resnext-?101.*32x8d", 88.8, 16.5, 31.2, RESNET),
    Pictures(r"resnext-?101", 44.2, 8.0, 21.2, RESNET),
    Pictures(r"resnext-?50", 25.0, 4.3, 14.4, RESNET),
    Pictures(r"resnet-?152", 60.2, 11.6, 22.6, RESNET),
    Pictures(r"resnet-?101", 44.5, 7.8, 16.2, RESNET),
    Pictures(r"resnet-?50", 25.6, 4.1, 11.1, RESNET),
    Pictures(r"resnet-?34", 21.8, 3.7, 3.7, RESNET),
    Pictures(r"resnet-?18", 11.7, 1.8, 2.5, RESNET),
    Pictures(r"wide_?resnet-?50", 68.9, 11.4, 14.4, RESNET),
    Pictures(r"vgg-?16", 138.4, 15.5, 13.6, ((0.10, 0.99), (0.90, 0.01))),
    Pictures(r"vgg-?19", 143.7, 19.6, 14.9, ((0.14, 0.99), (0.86, 0.01))),
    Pictures(r"alexnet", 61.1, 0.7, 0.6, ((0.06, 0.92), (0.94, 0.08))),
    Pictures(r"inception-?v?3", 23.8, 5.7, 9.0),
    Pictures(r"googlenet|inception-?v?1", 6.6, 1.5, 3.2),
    Pictures(r"densenet-?121", 8.0, 2.9, 6.9),
    Pictures(r"efficientnet-?_?b0", 5.3, 0.4, 6.7),
    Pictures(r"efficientnet-?_?b4", 19.3, 4.5, 50),
    Pictures(r"mobilenet_?v2", 3.5, 0.3, 6.7),
    Pictures(r"mobilenet_?v3", 5.5, 0.2, 4.4),
    Pictures(r"convnext.?large", 197.8, 34.4, 43.1),
    Pictures(r"convnext.?base", 88.6, 15.4, 28.8),
    Pictures(r"convnext.?tiny", 28.6, 4.5, 13.4),
    Pictures(r"regnet_?y.?128gf", 644.8, 127.7, 71.6),
    Pictures(r"swin.?b", 87.8, 15.5, 36.6),
    Pictures(r"swin.?t", 28.3, 4.5, 17.1),
    Pictures(r"vit.?(tiny|ti).*16", 5.7, 1.3, 6.0),
    Pictures(r"(vit|deit).?(small|s).*16", 22.1, 4.6, 11.9),
    Pictures(r"(vit|deit).?(base|b).*16", 86.6, 17.6, 23.9),
    Pictures(r"vit.?(base|b).*32", 88.2, 4.4, 5.0),
    Pictures(r"vit.?(large|l).*16", 304.3, 61.6, 63.5),
)
TEXT = (
    Text(r"mpt-?125m", 12, 768),
    Text(r"mpt-?350m", 24, 1024),
    Text(r"mpt-?760m", 24, 1536),
    Text(r"mpt-?1b", 24, 2048),
    Text(r"mpt-?3b", 32, 2560),
    Text(r"mpt-?7b", 32, 4096),
    Text(r"mpt-?13b", 40, 5120),
    Text(r"mpt-?30b", 48, 7168),
    Text(r"mpt-?70b", 80, 8192),
    Text(r"bert.?large|megatron bert", 24, 1024, 336, 512),
    Text(r"bert.?base", 12, 768, 110, 512),
    Text(r"transformer-?xl.*large", 18, 1024, 257, 384),
    Text(r"transformer-?xl", 16, 512, 192, 192),
    Text(r"transformer.*big", 12, 1024, 213, 32),
    Text(r"gpt-?2.?xl", 48, 1600, 1558, 1024),
    Text(r"gpt-?2.?large", 36, 1280, 774, 1024),
    Text(r"gpt-?2.?medium", 24, 1024, 355, 1024),
    Text(r"gpt-?2|nanogpt", 12, 768, 124, 1024),
    Text(r"tinyllama", 22, 2048, 1100, 2048),
    Text(r"llama.*70b", 80, 8192, 70600),
    Text(r"llama.*13b", 40, 5120, 13016),
    Text(r"llama.*[78]b", 32, 4096, 6738),
)
ASPECT = 100
"""Width over layers of transformers of which nothing but the size is known."""


def profile_of(
    model: str,
    million_parameters: float | None,
    sequence: int | None,
    width_bytes: int,
    *,
    pictures: bool,
) -> tuple[Profile, int]:
    """The model's profile, and the tokens of a sample (1 for pictures).

    `width_bytes` is that of an activation; `pictures` says what an unknown model is.  Raises
    `ValueError` where its size or the length of its sequences is not known.
    """
    name = model.lower()
    for picture in PICTURES:
        if re.search(picture.pattern, name):
            return _of_pictures(picture, million_parameters, width_bytes), 1
    text = next((each for each in TEXT if re.search(each.pattern, name)), None)
    millions = million_parameters or (text.million_parameters if text else None)
    if millions is None:
        raise ValueError("the model's size is not stated")
    if text is None and pictures:
        scale = millions / 25.6  # work and activations for its parameters as ResNet-50 has
        usual = Pictures(name, millions, 4.1 * scale, 11.1 * scale)
        return _of_pictures(usual, millions, width_bytes), 1
    if text is None:
        width = round((millions * 1e6 * ASPECT / 12) ** (1 / 3))
        text = Text(name, max(1, width // ASPECT), width)
    tokens = sequence or text.sequence
    if tokens is None:
        raise ValueError("the length of its sequences is not stated")
    return _of_text(text, millions * 1e6, tokens, width_bytes), tokens


def _of_pictures(of: Pictures, millions: float | None, width_bytes: int) -> Profile:
    parameters = 1e6 * (millions or of.million_parameters)
    activations = 1e6 * of.million_activations * width_bytes
    return _profile(
        [
            (parameters * part, 2e9 * of.giga_products * work, activations * work)
            for part, work in of.stages
        ],
        kind="convolution",
        calls=30,
        other=ACCESSES - 2,
    )


def _of_text(of: Text, parameters: float, tokens: int, width_bytes: int) -> Profile:
    """2 FLOPs a parameter and token, 4 s d of attention; 17 activations of width d are kept.

    The head is the embedding, whose gradient is whole only at the end of the backward pass.

    Source: Korthikanti and others, MLSys 2023, sections 3 and 4.1.
    """
    block = 12 * of.width**2
    between = max(0.0, parameters - of.layers * block)
    flops = tokens * (2 * block + 4 * tokens * of.width)
    kept = tokens * of.width * width_bytes
    embedding = (between, 0.0, kept)
    blocks = [(block, flops, 17 * kept)] * of.layers
    head = (0.0, 2 * tokens * between, kept)
    return _profile([embedding, *blocks, head], kind="product", calls=20, other=2)


def _profile(
    units: list[tuple[float, float, float]],
    *,
    kind: Literal["product", "convolution"],
    calls: int,
    other: int,
) -> Profile:
    """Of parameters, FLOPs and activation bytes of a sample; twice as much in the backward pass."""

    def operations(flops: float, kept: float, times: int) -> tuple[Operation, ...]:
        return (
            Operation(
                kind=kind,
                flops=Amount(per_sample=times * flops),
                bytes=Amount(per_sample=2 * times * kept),
                calls=calls * times,
            ),
            Operation(kind="other", bytes=Amount(per_sample=other * times * kept), calls=0),
        )

    made = tuple(
        Unit(
            name=str(number),
            parameters=round(parameters),
            trained_parameters=round(parameters),
            forward=operations(flops, kept, 1),
            backward=operations(flops, kept, 2),
            saved_bytes=Amount(per_sample=kept),
        )
        for number, (parameters, flops, kept) in enumerate(units)
    )
    total = sum(unit.parameters for unit in made)
    return Profile(units=made, size=ModelSize(parameters=total, trained_parameters=total))
