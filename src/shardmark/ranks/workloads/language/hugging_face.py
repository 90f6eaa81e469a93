"""Models of `transformers`, from a configuration or from a local folder.  Imports torch."""

from __future__ import annotations

import fnmatch
import re
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardmark.base.errors import InputError
from shardmark.ranks.workloads.base import CannotShard, SequencePlan, TensorPlan
from shardmark.ranks.workloads.chain import Call, Order, Part, checked_parts
from shardmark.ranks.workloads.configurations import text_sizes
from shardmark.ranks.workloads.language.gpt import positions_in, same_document
from shardmark.ranks.workloads.language.options import ATTENTION
from shardmark.ranks.workloads.model_building import seeded

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from shardmark.ranks.workloads.base import Exchange
    from shardmark.ranks.workloads.language.batch import TokenBatch
    from shardmark.ranks.workloads.language.data import LanguageData
    from shardmark.ranks.workloads.language.options import LanguageOptions


STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "row",
    "colwise_gather_output": "gathered",
    "colwise_rep": "gathered",
    "replicated_with_grad_allreduce": "summed",
}
"""Style names of transformers -> style names of `TensorPlan`."""
HEADS = {"num_attention_heads": "heads", "num_key_value_heads": "heads of keys and values"}
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""Keys of configurations for dropout inside attention heads."""
OTHER_STRATEGY = "use fsdp"
OTHER_KINDS = (
    "name a model of images as torchvision or timm do (resnet50, timm:NAME), or a task of your own"
    " that builds it, file.py:Task"
)
"""Ways to ask for a model that is none of transformers' language models."""


def build_model(options: LanguageOptions, data: LanguageData, seed: int) -> nn.Module:
    """Build a model in fp32, on the CPU, in training mode; downloads nothing, runs no remote code.

    Raises `InputError` if transformers cannot build the model.
    """
    import transformers

    auto_class: Any = transformers.AutoModelForCausalLM
    if options.objective == "masked":
        auto_class = transformers.AutoModelForMaskedLM
    elif "vision_config" in (options.configuration or {}):  # all of it, with the part for images
        auto_class = transformers.AutoModelForImageTextToText
    name = options.model.removeprefix("hf:")
    place = Path(name).expanduser()
    # By default SDPA, or eager attention where a model lacks it.
    settings = {"dtype": torch.float32, "attn_implementation": options.model_options.get(ATTENTION)}
    try:
        with seeded(seed):
            stored = options.has_file and place.is_dir()
            config = (
                transformers.AutoConfig.from_pretrained(place, local_files_only=True)
                if stored
                else _configuration(options, data.vocabulary)
            )
            if config.is_encoder_decoder:  # the decoder alone would be built
                problem = f"{config.model_type} has an encoder and a decoder"
                allowed = "name a task of your own that builds both"
                raise InputError("workload.model", problem, allowed)
            if stored:
                model: nn.Module = auto_class.from_pretrained(
                    place, local_files_only=True, use_safetensors=True, **settings
                )
                _check_sizes(options, model.config, data)
            else:
                model = auto_class.from_config(config, **settings)
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        # A list of all types may follow.
        reason = re.split(r"\.\n|\. Should contain", str(error))[0]
        allowed = "use options of its configuration, or a folder that save_pretrained has written"
        if "Unrecognized configuration class" in reason:
            reason = f"{config.model_type} is no language model in transformers"
            allowed = OTHER_KINDS
        elif "Unrecognized model identifier" in reason:
            reason = f"transformers {transformers.__version__} has no such model ({reason})"
            allowed = f"use a transformers that has it; {OTHER_KINDS}"
        raise InputError(
            "workload.model", f"{options.model} cannot be built: {reason}", allowed
        ) from error
    for config in (model.config, _text(model.config)):
        config.use_cache = False  # type: ignore[union-attr]
    model.train()  # a user's method may return nothing
    return model


def _configuration(options: LanguageOptions, vocabulary: int) -> Any:
    """Configuration by family or from the file, with the sizes of the workload."""
    from transformers import AutoConfig

    family = options.model.removeprefix("hf:")
    stored = dict(options.configuration or {})
    family = stored.pop("model_type", None if options.has_file else family)
    default = _text(AutoConfig.for_model(family))
    chosen = {key: value for key, value in options.model_options.items() if key != ATTENTION}
    unknown = [key for key in chosen if not hasattr(default, key)]
    if unknown:
        raise ValueError(f"its configuration has no {' and no '.join(unknown)}")
    # Pass sizes to the constructor, which derives other sizes from them.
    sizes = {**text_sizes(stored), **chosen, "vocab_size": vocabulary}
    if "text_config" in stored:
        sizes = stored | {"text_config": sizes}
    config = AutoConfig.for_model(family, **sizes)
    text = _text(config)
    max_positions = getattr(text, "max_position_embeddings", None)
    if max_positions is not None and max_positions < options.sequence_length:
        text.max_position_embeddings = options.sequence_length
    if vocabulary != text_sizes(stored).get("vocab_size"):
        # Remove the special tokens of the default tokenizer: this vocabulary has others.
        for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(text, key, None)
    return config


def _text(config: Any) -> Any:
    """Return the part of a model's configuration that describes its text."""
    return config.get_text_config()


def _check_sizes(options: LanguageOptions, config: Any, data: LanguageData) -> None:
    config = _text(config)
    max_positions = getattr(config, "max_position_embeddings", None) or options.sequence_length
    rows = config.vocab_size
    if rows != data.vocabulary:
        raise InputError(
            "workload.vocabulary",
            f"found {data.vocabulary}, {options.model} has {rows}",
            f"set it to {rows}, with the tokenizer of these weights",
        )
    if max_positions < options.sequence_length:
        raise InputError(
            "workload.sequence_length",
            f"found {options.sequence_length}",
            f"{options.model} takes {max_positions} at most",
        )


def layers(model: nn.Module, part: nn.Module | None = None) -> list[nn.Module] | None:
    """The repeated layers that the model declares, or those of a part; None if it declares none."""
    names = getattr(model, "_no_split_modules", None) or ()
    lists = [one for one in (part or model).modules() if isinstance(one, nn.ModuleList)]
    return [layer for group in lists for layer in group if type(layer).__name__ in names] or None


def text_layers(model: Any) -> list[nn.Module] | None:
    """The repeated layers of the part for text, where the model has one for images as well."""
    return layers(model, model.get_decoder())


def tensor_plan(model: nn.Module) -> TensorPlan | CannotShard:
    """The plan of transformers for this model; the token embedding is always sharded."""
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    config = _text(model.config)
    if not plan:
        name = type(model).__name__
        return CannotShard(f"transformers has no tensor-parallel plan for {name}", "use fsdp")
    if config.is_heterogeneous:
        return CannotShard("its layers have different numbers of heads", "use fsdp")
    if (dropout := _dropout(config)) is not None:
        return dropout
    names = [name for name, _ in model.named_modules()]
    styles = {
        pattern: STYLES.get(style, style)
        for pattern, style in plan.items()
        if fnmatch.filter(names, pattern)
    }
    tokens: Any = model.get_input_embeddings()  # type: ignore[operator]
    (embedding,) = (name for name, module in model.named_modules() if module is tokens)
    if not any(fnmatch.fnmatchcase(embedding, pattern) for pattern in styles):
        styles[embedding] = "row"
    return TensorPlan(styles=styles, units=_heads(config))


def _dropout(config: Any) -> CannotShard | None:
    """The reason why dropout in heads prevents sharding them; None without dropout."""
    for key in DROPOUTS:
        if getattr(config, key, 0):
            return CannotShard(
                f"{key} {getattr(config, key):g} would draw other masks in sharded heads",
                f"set workload.model_options.{key}: 0",
            )
    return None


def _heads(config: Any) -> dict[str, int]:
    if config.is_heterogeneous:
        return {}
    counts = {name: getattr(config, key, None) for key, name in HEADS.items()}
    return {name: count for name, count in counts.items() if count is not None}


def sequence_plan(
    model: nn.Module, part: Callable[[Any, int, int], Any], length: int
) -> SequencePlan | CannotShard:
    """A plan for models whose attention can be replaced by transformers' attention interface."""
    config = _text(model.config)
    name, heads = type(model).__name__, _heads(config)
    replaceable = getattr(model, "_supports_attention_backend", False)
    if not (replaceable and heads and "position_ids" in signature(model.forward).parameters):
        reason = f"transformers cannot replace the attention of {name}"
        return CannotShard(reason, OTHER_STRATEGY)
    layer_types = {*(getattr(config, "layer_types", None) or ())}
    if others := layer_types - {"full_attention", "sliding_attention"}:
        reason = f"layers of {name} have {' and '.join(sorted(others))}"
        return CannotShard(reason, OTHER_STRATEGY)
    window = getattr(config, "sliding_window", None)
    if window is not None and window < length:
        reason = f"{name} has sliding-window attention over {window} positions"
        return CannotShard(reason, f"set workload.sequence_length: {window}, or use fsdp")
    attend = partial(_attend, model)
    units = {**heads, "positions": length}
    return _dropout(config) or SequencePlan(attend=attend, part=part, units=units)


def _attend(model: nn.Module, exchange: Exchange) -> None:
    """Make the model's attention compute full sequences of some heads."""
    from transformers import AttentionInterface

    full_attention = AttentionInterface()["sdpa"]

    def attention(
        module: nn.Module,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attend from (batch, heads, length, channels) to (batch, length, heads, channels)."""
        # Under autocast rotary embeddings return fp32, which would be exchanged unrounded.
        inputs = (tensor.type_as(values) for tensor in (queries, keys, values))
        full = [exchange.to_heads(tensor, positions=2, heads=1) for tensor in inputs]
        mixed, _ = full_attention(module, *full, mask, **options)
        return exchange.to_positions(mixed, positions=1, heads=2), None

    name = f"exchanging-{id(exchange)}"
    AttentionInterface.register(name, attention)
    model.config._attn_implementation = name  # type: ignore[union-attr]


def pipeline_parts(model: nn.Module, call: Call) -> list[nn.Module] | CannotShard:
    """Cut the model into embeddings, layers and head, each computed by the model's own forward.

    `call` returns the logits of a model, or of a chain of parts, for a sample.
    """
    chosen = text_layers(model)
    if not chosen:
        reason = f"transformers does not declare the layers of {type(model).__name__}"
        return CannotShard(reason, OTHER_STRATEGY)
    return checked_parts(model, chosen, call, _parts)


def _parts(order: Order) -> list[nn.Module]:
    return [
        _Part(order, order.early, order.layers[0]),
        *(_Part(order, [layer], layer) for layer in order.layers),
        _Part(order, order.late),
    ]


class _Part(Part):
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        return_dict: bool = False,
    ) -> tuple[Tensor, ...]:
        """Compute the next hidden state from tokens or a hidden state, and pass on the masks."""
        name = "input_ids" if input_ids.dim() == 2 else "inputs_embeds"
        others = {"attention_mask": attention_mask, "position_ids": position_ids}
        arguments = {name: input_ids, "return_dict": return_dict, **others}
        hidden = self.computed(input_ids, **arguments)
        if isinstance(hidden, tuple):  # the output of the model
            return hidden[:1]
        return hidden, *(tensor for tensor in others.values() if tensor is not None)


def active_parameters(model: nn.Module) -> int | None:
    """Parameters that compute a token, embeddings included; None for a model without experts."""
    config = _text(model.config)
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)
    unused = 0
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):  # its tensors have the experts in front
            matrices = sum(p.numel() for p in module.parameters(recurse=False))
            used = int(chosen) / int(module.num_experts)  # type: ignore[arg-type]
            unused += round((1 - used) * matrices)
    return sum(p.numel() for p in model.parameters()) - unused if unused else None


def arguments_of(batch: TokenBatch, *, causal: bool) -> dict[str, Tensor | bool]:
    """Arguments of the model's forward, whose first output are the logits."""
    arguments: dict[str, Tensor | bool] = {"input_ids": batch.inputs, "return_dict": False}
    positions = batch.positions
    if batch.documents is not None:
        allowed = same_document(batch.documents)
        arguments["attention_mask"] = allowed.tril() if causal else allowed
        positions = positions_in(batch.inputs, batch.documents) if positions is None else positions
    if positions is not None:
        arguments["position_ids"] = positions
    return arguments
