"""A task for models of diffusers that predict the noise in latent images, on random inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from shardmark.base.errors import InputError
from shardmark.base.system.extras import require
from shardmark.ranks.workloads.configurations import (
    CLASS,
    FRAMES,
    LATENT_PIXELS,
    LATENT_SIZE,
    NOISE_MODELS,
    stored_configuration,
)

STEPS = 1000
SAMPLES = 16
ON_TOKENS = ("FluxTransformer2DModel", "Flux2Transformer2DModel", "QwenImageTransformer2DModel")
"""Classes that take squares of four latents as tokens."""


class DiffusersModel:
    """Trains a model from its configuration on random latents and texts, so that only its cost has
    a meaning.

    The encoders of images and texts are not part of it, as where their outputs are stored before
    the training.  `image_size` is in pixels, by default what the model was trained with; images
    and those of a video are square.
    """

    synthetic = True
    equal_blocks = True

    def __init__(self, model: str, image_size: int | None = None) -> None:
        require("diffusers", needed_for=f"model {model}")
        import diffusers

        stored = dict(stored_configuration(model) or {})
        self._class = str(stored.pop(CLASS, None))
        if self._class not in NOISE_MODELS:
            allowed = f"allowed are {', '.join(NOISE_MODELS)}"
            raise InputError(f"model {model}", f"found the class {self._class}", allowed)
        if image_size is not None:
            if image_size % (2 * LATENT_PIXELS):
                allowed = f"use a multiple of {2 * LATENT_PIXELS} pixels"
                raise InputError("workload.options.image_size", f"found {image_size}", allowed)
            stored["sample_size"] = image_size // LATENT_PIXELS
        self._model_class: Any = getattr(diffusers, self._class)
        defaults = signature(self._model_class.__init__).parameters.values()
        self._config = {key.name: key.default for key in defaults if key.name != "self"}
        self._config |= {key: value for key, value in stored.items() if not key.startswith("_")}
        self._size = self._config.pop("sample_size", None) or LATENT_SIZE

    def model(self) -> nn.Module:
        takes_size = "sample_size" in signature(self._model_class.__init__).parameters
        sizes = {"sample_size": self._size} if takes_size else {}
        model: nn.Module = self._model_class(**self._config, **sizes)
        return model.train()

    def train_data(self) -> Sequence[Mapping[str, Tensor]]:
        return [self._sample() for _ in range(SAMPLES)]

    validation_data = train_data

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean squared error of the predicted noise, which is mixed with latents."""
        inputs = dict(batch)
        latents, noise, steps = (inputs.pop(name) for name in ("latents", "noise", "timestep"))
        share = ((steps + 1) / (STEPS + 1)).view(-1, *[1] * (latents.dim() - 1)).to(latents.dtype)
        mixed = (1 - share).sqrt() * latents + share.sqrt() * noise
        if "time_ids" in inputs:
            added = {name: inputs.pop(name) for name in ("text_embeds", "time_ids")}
            inputs["added_cond_kwargs"] = added  # type: ignore[assignment]
        if self._class in ON_TOKENS:
            steps = steps / STEPS
            side, axes = self._size // 2, len(self._config["axes_dims_rope"])
            texts = inputs["encoder_hidden_states"].shape[1]
            if self._class == "QwenImageTransformer2DModel":
                inputs["img_shapes"] = [[(1, side, side)]] * len(latents)  # type: ignore[assignment]
            else:
                inputs["img_ids"] = _places(side, axes).to(latents.device)
                inputs["txt_ids"] = torch.zeros(texts, axes, device=latents.device)
        if self._class == "PixArtTransformer2DModel":
            inputs["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None}  # type: ignore[assignment]
        predicted: Tensor = model(mixed, timestep=steps, return_dict=False, **inputs)[0]
        predicted = predicted[:, : noise.shape[1]]  # some predict a variance, too
        return nn.functional.mse_loss(predicted.float(), noise.float())

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        kinds = {*(getattr(model, "_no_split_modules", None) or ()), "BasicTransformerBlock"}
        lists = [one for one in model.modules() if isinstance(one, nn.ModuleList)]
        layers_of_kinds = [
            layer for layers in lists for layer in layers if type(layer).__name__ in kinds
        ]
        blocks = {*layers_of_kinds}
        # A U-Net's parts are blocks of blocks.
        return [one for one in layers_of_kinds if len(blocks.intersection(one.modules())) == 1]

    def _sample(self) -> dict[str, Tensor]:
        """Return latents, noise, its share of 1000, and what the model is told besides."""
        config = self._config
        shape: tuple[int, ...] = (config["in_channels"], self._size, self._size)
        if self._class in ON_TOKENS:
            shape = ((self._size // 2) ** 2, config["in_channels"])
        if frames := FRAMES.get(self._class):  # four after the first have one latent
            shape = (config["in_channels"], frames // 4 + 1, self._size, self._size)
        sample = {
            **{"latents": torch.randn(shape), "noise": torch.randn(shape)},
            "timestep": torch.randint(STEPS, ()),
        }
        tokens = NOISE_MODELS[self._class]
        if not tokens:
            return sample | {"class_labels": torch.randint(config["num_embeds_ada_norm"], ())}
        width = next(
            config[key]
            for key in (
                "joint_attention_dim",
                "caption_channels",
                "cross_attention_dim",
                "text_dim",
            )
            if config.get(key)
        )
        sample["encoder_hidden_states"] = torch.randn(tokens, width)
        if pooled := config.get("pooled_projection_dim"):
            sample["pooled_projections"] = torch.randn(pooled)
        if config.get("guidance_embeds"):
            sample["guidance"] = torch.ones(())
        if config.get("addition_embed_type") == "text_time":
            ids = 6  # height and width before and after a cut, and where it was
            id_width = ids * config["addition_time_embed_dim"]
            sample["text_embeds"] = torch.randn(
                config["projection_class_embeddings_input_dim"] - id_width
            )
            sample["time_ids"] = torch.ones(ids)
        return sample


def _places(side: int, axes: int) -> Tensor:
    """Return row and column of each token of a square image, between zeros."""
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    zeros = [torch.zeros_like(rows)] * (axes - 3)
    return (
        torch.stack([torch.zeros_like(rows), rows, columns, *zeros], dim=-1).flatten(0, 1).float()
    )
