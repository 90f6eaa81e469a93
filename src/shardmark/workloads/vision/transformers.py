"""How vision transformers of torchvision and timm are divided over ranks.  Imports torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardmark.workloads.base import CannotShard, TensorPlan
from shardmark.workloads.chain import Call, Order, Part, checked_parts

PLANS = {
    "torchvision": {
        "encoder.layers.*.mlp.0": "column",
        "encoder.layers.*.mlp.3": "row",
        "heads.head": "gathered",
    },
    "timm": {"blocks.*.mlp.fc1": "column", "blocks.*.mlp.fc2": "row", "head": "gathered"},
}
"""By library.  Attention stays whole: its queries, keys and values are one matrix, whose slices are
not heads."""
NETWORKS = ("MLPBlock", "Mlp")
"""Of two layers, and nothing between them that looks at several features."""


def is_vision_transformer(model: nn.Module) -> bool:
    return type(model).__name__ == "VisionTransformer" and _library(model) in PLANS


def _library(model: nn.Module) -> str:
    return type(model).__module__.partition(".")[0]


def _layers(model: Any) -> list[nn.Module]:
    return [*(model.encoder.layers if _library(model) == "torchvision" else model.blocks)]


def tensor_plan(model: nn.Module) -> TensorPlan | CannotShard:
    """Two thirds of a layer: its network, but not its attention."""
    for layer in _layers(model):
        network: Any = getattr(layer, "mlp", None)
        if type(network).__name__ not in NETWORKS or _has_norm(network):
            return CannotShard("its layers have networks of another kind", "use fsdp")
        if any(isinstance(module, nn.Dropout) and module.p for module in network.modules()):
            found = "dropout would draw other masks in divided layers"
            return CannotShard(found, "set it to 0 in workload.model_options")
    return TensorPlan(styles=PLANS[_library(model)])


def _has_norm(network: nn.Module) -> bool:
    return any(True for name, _ in network.named_parameters() if name.startswith("norm."))


def pipeline_parts(model: nn.Module, call: Call) -> list[nn.Module] | CannotShard:
    """Patches with their positions, layers, and what classifies."""
    return checked_parts(model, _layers(model), call, _parts)


def _parts(order: Order) -> list[nn.Module]:
    return [_Begin(order, order.early, order.layers[0]), *order.layers, _End(order, order.late)]


class _Begin(Part):
    def forward(self, pictures: Tensor) -> Tensor:
        tokens: Tensor = self.computed(pictures, pictures)
        return tokens


class _End(Part):
    def forward(self, tokens: Tensor) -> Tensor:
        model: Any = self.model
        if _library(model) == "torchvision":
            logits: Tensor = model.heads(model.encoder.ln(tokens)[:, 0])
        else:
            logits = model.forward_head(model.norm(tokens))
        return logits
