"""Tensor and pipeline plans of torchvision's and timm's vision transformers.  Imports torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardmark.ranks.workloads.base import CannotShard, TensorPlan
from shardmark.ranks.workloads.chain import Call, Order, Part, checked_parts

PLANS = {
    "torchvision": {
        "encoder.layers.*.mlp.0": "column",
        "encoder.layers.*.mlp.3": "row",
        "heads.head": "gathered",
    },
    "timm": {"blocks.*.mlp.fc1": "column", "blocks.*.mlp.fc2": "row", "head": "gathered"},
}
"""Tensor-parallel styles by library.  Attention is replicated: slices of the matrix that holds its
queries, keys and values are not heads."""
MLP_CLASSES = ("MLPBlock", "Mlp")
"""Classes of MLPs with two linear layers and an elementwise function between them."""


def is_vision_transformer(model: nn.Module) -> bool:
    return type(model).__name__ == "VisionTransformer" and _library(model) in PLANS


def _library(model: nn.Module) -> str:
    return type(model).__module__.partition(".")[0]


def _layers(model: Any) -> list[nn.Module]:
    return [*(model.encoder.layers if _library(model) == "torchvision" else model.blocks)]


def tensor_plan(model: nn.Module) -> TensorPlan | CannotShard:
    """Shard the MLPs, which hold two thirds of the parameters of a layer, and the head."""
    for layer in _layers(model):
        mlp: Any = getattr(layer, "mlp", None)
        has_norm = mlp is not None and any(n.startswith("norm.") for n, _ in mlp.named_parameters())
        if type(mlp).__name__ not in MLP_CLASSES or has_norm:
            return CannotShard("the MLPs of its layers are of an unknown class", "use fsdp")
        if any(isinstance(module, nn.Dropout) and module.p for module in mlp.modules()):
            reason = "dropout in a sharded layer would draw other masks than on one device"
            return CannotShard(reason, "set dropout to 0 in workload.model_options")
    return TensorPlan(styles=PLANS[_library(model)])


def pipeline_parts(model: nn.Module, call: Call) -> list[nn.Module] | CannotShard:
    """Cut the model into its patch embedding, its layers and its classification head."""

    def parts(order: Order) -> list[nn.Module]:
        embedding = _Embedding(order, order.early, order.layers[0])
        return [embedding, *order.layers, _Head(order, order.late)]

    return checked_parts(model, _layers(model), call, parts)


class _Embedding(Part):
    def forward(self, pictures: Tensor) -> Tensor:
        tokens: Tensor = self.computed(pictures, pictures)
        return tokens


class _Head(Part):
    def forward(self, tokens: Tensor) -> Tensor:
        model: Any = self.model
        if _library(model) == "torchvision":
            logits: Tensor = model.heads(model.encoder.ln(tokens)[:, 0])
        else:
            logits = model.forward_head(model.norm(tokens))
        return logits
