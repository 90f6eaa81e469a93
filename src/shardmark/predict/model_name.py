"""Makes the experiment of a question about a model, which needs no file and no data.

Imports no torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmark.base.errors import InputError
from shardmark.base.recipe import Optimizer
from shardmark.base.text import as_text
from shardmark.experiment.axes import SIZE_AXES
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.load import from_mapping, preset_names
from shardmark.experiment.messages import nearest
from shardmark.predict.hardware.catalogue import GiB, NodeType
from shardmark.ranks.trial import Trial
from shardmark.ranks.workloads import options_class
from shardmark.ranks.workloads.configurations import (
    CLASS,
    CLASSES,
    FRAMES,
    LATENT_PIXELS,
    LATENT_SIZE,
    PREFIX,
    SOUND,
    SOUND_SECONDS,
    TEXT_TO_TEXT,
    shipped,
    shipped_name,
    stored_configuration,
    target_tokens,
    text_sizes,
)
from shardmark.ranks.workloads.language.options import (
    ATTENTION,
    ENCODERS,
    HUGGING_FACE,
    LanguageOptions,
)
from shardmark.ranks.workloads.models import (
    check_model_name,
    is_user_function,
    registered_names,
    user_definition,
)
from shardmark.ranks.workloads.options import Adapter

if TYPE_CHECKING:
    from shardmark.predict.request import PlanRequest

DIFFUSERS_TASK = "shardmark.predict.tasks.diffusers_model:DiffusersModel"
TRANSFORMERS_TASK = "shardmark.predict.tasks.transformers_model:TransformersModel"
SCANNED = ("falcon_mamba", "mamba")
"""Model types of transformers whose layers go through a sequence step by step without kernels."""
ASSUMED_STEPS = 100
"""Steps of the recipe of a model that is named alone, which mean nothing."""
LONGEST = 4096
"""Sequence length of a language model that takes longer ones, unless it is given."""
ADAMW = {"name": "adamw", "lr": 1e-4, "weight_decay": 0.1}
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
EACH_PASS = "reduce_each_pass"
"""Option of FSDP for accumulation: other programs reduce gradients in each micro-batch."""
CASTS = "mixed_precision"
"""Option of FSDP and ZeRO, which `run` leaves at autocast in fp16."""
REFERENCES = (
    "no reference model or generation as in DPO or GRPO",
    "a frozen reference model in 16 bits, whose pass is not timed",
    "the base as the reference model, whose pass is not timed",
)
FUSED_LOSSES = (
    *("gemma", "gemma3", "gemma3_text", "glm4", "gpt_oss", "hunyuan_v1_dense", "llama", "llama4"),
    *("mistral", "mistral3", "mixtral", "olmo2", "olmo3", "phi3", "qwen2", "qwen2_5_vl"),
    *("qwen2_moe", "qwen2_vl", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"),
    *("smollm3", "smolvlm"),
)
"""Model types whose output layer and loss Liger Kernel, Unsloth or torchtune compute in pieces."""
LOSS_CHUNKS = 2
"""Pieces of that loss: programs that fuse it need less memory, and others of the stack more."""
LOGIT_BYTES = 12
"""Bytes of a logit in a loss that is not fused: its fp32 value, its probability, its gradient."""
ADAPTED = ("language", "own")
"""Workloads that take adapters."""
IMAGES = 64
"""Images of a GPU in a step of a classifier."""
IMAGE_SIZE = 224
OTHER_IMAGE_SIZES = {
    **{"vit_cifar": 32, "vit_digits": 8, "inception_v3": 299},
    **{
        f"efficientnet_b{number}": size
        for number, size in enumerate((240, 260, 300, 380, 456, 528, 600), start=1)
    },
}
"""Sizes of models that are built for others than `IMAGE_SIZE`; EfficientNet's (arXiv:1905.11946)
are those of its authors' code."""
SIZE_IN_NAME = re.compile(
    r"(?:patch|window)\d+\w*_(?P<size>\d{3})\b"
    r"|_(?P<other>2(?:24|40|56|88)|3(?:36|78|84|92)|4(?:16|48)|51[28]|560)\b"
)
"""Names of torchvision and timm that end with the size of the images; other numbers at the end of
a name are widths, as in regnetx_320 and mobilenetv3_large_100."""
DETECTOR_SIDE = 923
"""Side of a square with the area of COCO's usual images, of which torchvision makes 800 x 1,066."""
DETECTOR_SIDES = {"fasterrcnn_mobilenet_v3_large_320_fpn": 370, "fcos_resnet18_fpn": 128}
"""The same of detectors for smaller images."""
PICTURES = re.compile(r"(beit|convnext(v2)?|deit|efficientnet|regnet|resnet|swin(v2)?|vit)-.*")
"""Names at Hugging Face of models that torchvision or timm have, with as many parameters."""
PRETRAINED = re.compile(r"-(pt|ft|in)?\d+k\b")
"""Marks of weights in such a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """Assumptions about a model that is named without an experiment."""

    workload: Mapping[str, Any]
    batch: int
    """Samples of a GPU in a step."""
    sample: str
    """Name of one sample, as `image of 224 x 224`."""
    optimizer: Mapping[str, Any] = field(default_factory=lambda: ADAMW)


def experiment_of(
    request: PlanRequest, machines: Sequence[tuple[NodeType, int]], precision: str
) -> tuple[Experiment, str]:
    """Return an experiment with the model of a request, and what was assumed of it.

    Each of the machines has its number of nodes.  Raises `InputError` for an unknown model.
    """
    name, adapter, sequence_length = str(request.subject), request.adapter, request.sequence_length
    counts = [node.node.devices * nodes for node, nodes in machines]
    devices, nodes = max(counts), max(nodes for _, nodes in machines)
    try:
        model = named_model(name, sequence_length)
    except (AttributeError, TypeError) as error:
        raise InputError(name, f"no configuration: {error}", "name a config.json") from error
    options = {**model.workload, **model.workload.get("options", {})}
    sizes = str(options.get("model", "")).removeprefix(PREFIX)
    if sequence_length is not None and not {"sequence_length", "target_length"} & options.keys():
        raise InputError("--sequence-length", f"{name} has no sequences", "leave it out")
    workload = {**model.workload, **_software(model.workload, request, precision)}
    if adapter is not None:
        workload["adapter"] = adapter_of(adapter, precision).model_dump()
        if workload["name"] not in ADAPTED:
            allowed = "leave it out: language models and tasks of your own take adapters"
            raise InputError("--adapter", f"{name} takes no adapter", allowed)
    content = {
        "name": re.sub(r"[^\w.-]+", "-", name.rpartition("/")[2]).strip("-._")[:60] or "model",
        "workload": workload,
        "recipe": {
            "per_rank_batch": request.batch or model.batch,
            "steps": ASSUMED_STEPS,
            "optimizer": model.optimizer,
            "precision": precision,
        },
        "matrix": {
            "strategy": strategies_of(devices, nodes, min(counts)),
            "world_size": [devices],
        },
        "device": "cuda",
    }
    experiment = from_mapping(content, request.overrides, place=name)
    sizes_given = {key: experiment.matrix[key] for key in experiment.matrix if key in SIZE_AXES}
    sizes_given |= experiment.placement.model_dump(exclude_defaults=True)
    if sizes_given != {"world_size": [devices]}:
        allowed = "the machine says it: --on 4xh100, or --on 2x8xh100 for two nodes"
        raise InputError("--set", f"found {as_text(sizes_given)}", allowed)
    recipe, passes = experiment.recipe, experiment.recipe.gradient_accumulation
    if recipe.epochs is not None and not is_user_function(name):
        allowed = "give --samples NUMBER --epochs NUMBER"
        raise InputError("--set recipe.epochs", f"{name} comes without data", allowed)
    count = recipe.per_rank_batch or recipe.global_batch
    sample, kind = model.sample, model.workload["name"]
    chosen = experiment.workload.model_dump()
    for key, size in (chosen | (chosen.get("options") or {})).items():
        if key.endswith(("_size", "_length")) and key in options:
            sample = re.sub(rf"\b{options[key]}\b", f"{size}", sample)
    if f" {DETECTOR_SIDE} x " in sample:
        sample += " (COCO's mean; a batch can have twice as many pixels)"
    sample = sample if count == 1 else re.sub(r"^\w+", r"\g<0>s", sample)
    pictures = "image" in model.sample
    is_partly_frozen = kind == "detection" and bool(getattr(experiment.workload, "weights", None))
    has_library_name = sizes in shipped() or kind == "classification"
    named_otherwise = not name.endswith(sizes) and has_library_name
    parts = [
        *([f"the sizes of {sizes}"] if named_otherwise else []),
        f"{count} {sample} {'a GPU' if recipe.per_rank_batch else 'on all GPUs'} and step"
        f"{f' in {passes} micro-batches' if passes > 1 else ''}",
        *(["products in TF32"] if recipe.tf32 and recipe.precision == "fp32" else []),
        *(["first layers of its backbone frozen"] if is_partly_frozen else []),
        *(["loaders that keep up"] if pictures else []),
        *(["no channels_last"] if pictures and not recipe.channels_last else []),
        _optimizer(recipe.optimizer),
        _recomputation(recipe.activation_checkpointing),
    ]
    if isinstance(experiment.workload, LanguageOptions) and experiment.workload.loss_chunks > 1:
        of_gpu = (count or 1) // (1 if recipe.per_rank_batch else devices)
        parts.append(_pieces(experiment.workload, of_gpu // passes))
    if (adapted := getattr(experiment.workload, "adapter", None)) is not None:
        parts.append(f"LoRA of rank {adapted.rank} beside {adapted.base} weights")
    if kind == "language":
        parts.append(REFERENCES[request.reference_model * (1 + (adapted is not None))])
    return experiment, f"{', '.join(parts)}; --batch and --set KEY=VALUE change it"


def _software(
    workload: Mapping[str, Any], request: PlanRequest, precision: str
) -> Mapping[str, Any]:
    """Return the options of a model of transformers that depend on the vintage of the software."""
    name = str(workload.get("model"))
    if workload.get("task") == TRANSFORMERS_TASK and request.stack == "eager":
        return {"options": {**workload["options"], "attention": "eager"}}
    if not name.startswith(PREFIX):
        return {}
    if request.stack == "eager":
        return {"model_options": {ATTENTION: "eager"}}
    attention = {"model_options": {ATTENTION: "flash_attention_2"}} if precision == "bf16" else {}
    kind = (stored_configuration(name) or {}).get("model_type", name.removeprefix(PREFIX))
    in_pieces = kind in FUSED_LOSSES and not request.search  # which divides layers
    return {**attention, **({"loss_chunks": LOSS_CHUNKS} if in_pieces else {})}


def _pieces(workload: LanguageOptions, samples: int) -> str:
    """Return, for example, `loss in 2 pieces (in one, without Liger: up to 2 GiB more)`."""
    pieces = workload.loss_chunks
    logits = samples * workload.sequence_length * (workload.model_rows or 0)
    more_gib = (1 - 1 / pieces) * LOGIT_BYTES * logits / GiB
    one = f"in one, without Liger: up to {float(f'{more_gib:.2g}'):g} GiB more"
    return f"loss in {pieces} pieces ({one})" if logits else f"loss in {pieces} pieces"


def _optimizer(optimizer: Optimizer) -> str:
    names = {"adamw": "AdamW", "sgd": "SGD", "lamb": "LAMB"}
    user_class = (optimizer.path or "").rpartition(":")[2]
    name = user_class or names.get(optimizer.name, optimizer.name.capitalize())
    return name if optimizer.state_bits == 32 else f"{name} of {optimizer.state_bits}-bit state"


def _recomputation(checkpointing: bool | str | int) -> str:
    if isinstance(checkpointing, str):
        return f"{checkpointing} activation checkpointing"
    if isinstance(checkpointing, bool):
        return f"{'' if checkpointing else 'no '}activation checkpointing"
    return f"activation checkpointing of one block in {checkpointing}"


def adapter_of(name: str, precision: str) -> Adapter:
    """Return the adapter `lora`, with frozen weights in the precision of products, or `qlora`.

    A base in another type would be cast, and autocast keeps the casts of a pass.
    Raises `InputError` for another name.
    """
    bases = {"lora": precision, "qlora": "nf4"}
    if name.lower() not in bases:
        raise InputError("--adapter", f"found {name!r}", f"allowed are {' and '.join(bases)}")
    return Adapter.model_validate({"base": bases[name.lower()]})


def strategies_of(devices: int, nodes: int, least_devices: int | None = None) -> list[Any]:
    """Return the strategies that a question about a model compares.

    `least_devices` is the size of the smallest of several machines.
    """
    if least_devices == 1 < devices:
        return ["single", *strategies_of(devices, nodes)]
    if devices == 1:
        return ["single"]
    if nodes == 1:
        return ["ddp", "zero-1", "zero-2", "zero-3", "fsdp-grad-op", "fsdp"]
    hybrid = {"name": "fsdp-hybrid", "shard_group": devices // nodes}
    return ["ddp", "zero-1", "zero-2", "zero-3", hybrid, "fsdp"]


def as_usual(cell: Trial) -> Trial:
    """Return the cell with options of other programs where its strategy has none: FSDP reduces each
    micro-batch's gradients, and FSDP and ZeRO cast parameters to fp16 as they do to bf16."""
    usual: dict[str, Any] = {EACH_PASS: True} if cell.recipe.gradient_accumulation > 1 else {}
    if cell.recipe.precision == "fp16" and cell.workload.casts_parameters:
        usual[CASTS] = "native"
    return with_strategy_options(cell, usual | cell.strategy.options)


def with_strategy_options(cell: Trial, options: Mapping[str, Any]) -> Trial:
    """Return the cell with those of the options that its strategy has."""
    present = {name: options[name] for name in options if hasattr(cell.built_strategy, name)}
    return cell.changed(strategy=cell.strategy.model_copy(update={"options": present}))


def is_experiment(name: str) -> bool:
    """Return whether the name is a preset or an experiment's file, and not a model."""
    path = Path(name).expanduser()
    is_file = path.suffix != ".json" and ":" not in path.name and path.is_file()
    is_run = (path / "experiment.yaml").is_file()
    return is_file or is_run or name in preset_names() or path.suffix in {".yaml", ".yml"}


def named_model(name: str, sequence_length: int | None = None) -> NamedModel:
    """Return the workload of a model by its name.  Raises `InputError` for an unknown one."""
    name = re.sub(r"^timm/", "timm:", name.rstrip("/"))
    folder = Path(name.removeprefix(PREFIX)).expanduser()
    has_file = folder.suffix == ".json" or (folder / "config.json").is_file()
    if is_user_function(name):
        return _of_user(name, sequence_length)
    if not has_file and (picture := _picture_model(name.removeprefix(PREFIX))) is not None:
        return _of_pictures(*picture)
    if name.startswith(PREFIX) or has_file or "/" in name:
        return _of_transformers(name, sequence_length)
    detectors = options_class("detection").models
    if name in detectors:
        side = DETECTOR_SIDES.get(name, DETECTOR_SIDE)
        weights = {"weights": "imagenet", "download": True}
        workload = {"name": "detection", "model": name, **weights, "min_size": side}
        image = f"image of {side} x {side}"
        return NamedModel(workload=workload, batch=2, sample=image, optimizer=SGD)
    try:
        check_model_name(name)
    except ValueError as error:
        if shipped_name(name) is not None:
            return _of_transformers(name, sequence_length)
        names = (*preset_names(), *shipped(), *detectors, *registered_names("torchvision"))
        allowed = (
            "allowed are an experiment's file, a preset, a model of torchvision, timm:NAME,"
            " hf:OWNER/NAME, hf:FILE.json, a folder of save_pretrained, module:function and a"
            f" task's module:Class{nearest(name, names, count=3)}"
        )
        is_missing = "not installed" in str(error)
        raise InputError(name, str(error) if is_missing else "no such model", allowed) from None
    return _of_pictures(name)


def _picture_model(name: str) -> tuple[str, int | None] | None:
    """Return the name in torchvision or timm of a model of images at Hugging Face, and the size of
    the images where the library's name has none.  Return None for another name."""
    text = PRETRAINED.sub("", name.rpartition("/")[2].lower())
    if shipped_name(name) is not None or PICTURES.fullmatch(text) is None:
        return None
    without_size, _, size = text.rpartition("-")
    for spelling, pixels in (
        *((text, None), (text.replace("-patch4", ""), None)),  # timm's Swin v2 names no patch
        (without_size, size),
    ):
        for prefix, library in (("", "torchvision"), ("timm:", "timm")):
            names = {re.sub(r"\W|_", "", other): other for other in registered_names(library)}
            if (model := names.get(re.sub(r"\W|_", "", spelling))) is not None:
                is_size = re.fullmatch(r"[1-9]\d\d", pixels or "")
                return f"{prefix}{model}", int(is_size[0]) if is_size else None
    return None


def _of_pictures(name: str, size: int | None = None) -> NamedModel:
    if (size_in_name := SIZE_IN_NAME.search(name)) is not None:
        size = int(size_in_name["size"] or size_in_name["other"])
    size = size or OTHER_IMAGE_SIZES.get(name.removeprefix("timm:"), IMAGE_SIZE)
    sizes = {"image_size": size, "classes": 1000}
    workload = {"name": "classification", "model": name, "dataset": "random", **sizes}
    by_adamw = re.search(r"vit|swin|deit|beit|convnext|eva", name)  # as in their papers
    return NamedModel(
        workload=workload,
        batch=IMAGES,
        sample=f"image of {size} x {size}",
        optimizer=ADAMW if by_adamw else SGD,
    )


def _of_transformers(name: str, sequence_length: int | None) -> NamedModel:
    model, stored = _stored(name)
    if CLASS in stored:
        pixels = LATENT_PIXELS * stored.get("sample_size", LATENT_SIZE)
        kind, batch = "image", 4 if stored.get("sample_size") else 1
        if frames := FRAMES.get(stored[CLASS]):
            kind, batch = f"video of {frames} frames", 1
        sample = f"{kind} of {pixels} x {pixels} as stored latents"
        latents = {"model": model, "image_size": pixels}
        task = {"name": "own", "task": DIFFUSERS_TASK, "options": latents}
        return NamedModel(workload=task, batch=batch, sample=sample)
    kind = stored.get("model_type", model.removeprefix(PREFIX))
    if kind in CLASSES:
        options: dict[str, Any] = {"model": model}
        sample = "sample"
        if kind in TEXT_TO_TEXT:
            length = sequence_length or 512
            options["sequence_length"] = length
            sample = f"sample of {length} tokens and {target_tokens(kind, length)} of target"
        if kind == "whisper":
            options["target_length"] = sequence_length or 448
            sample = f"sample of 30 s, 1500 positions, and {options['target_length']} of text"
        if kind in SOUND:
            sample = f"sample of {SOUND_SECONDS} s"
        batch = 8
        if CLASSES[kind] == "AutoModelForImageClassification":
            sample, batch = f"image of {IMAGE_SIZE} x {IMAGE_SIZE}", IMAGES
        task = {"name": "own", "task": TRANSFORMERS_TASK, "options": options}
        return NamedModel(workload=task, batch=batch, sample=sample)
    if kind in SCANNED:
        allowed = "name a task of your own, file.py:Task, with the kernels, or measure it with run"
        raise InputError(name, "its scan cannot be traced without the kernels of GPUs", allowed)
    sizes, longest = text_sizes(stored), LONGEST
    for key in ("max_position_embeddings", "n_positions"):
        longest = min(longest, sizes.get(key) or longest)
    if kind in ENCODERS:
        longest = min(longest, 512)
    workload: dict[str, Any] = {
        "name": "language",
        "model": model,
        "dataset": "random",
        "sequence_length": sequence_length or longest,
        "objective": "masked" if kind in ENCODERS else "causal",
    }
    if not isinstance(sizes.get("vocab_size"), int):
        workload["vocabulary"] = 32_000  # a family's; its tokenizer decides it
    alone = " of text alone" if "vision_config" in stored else ""
    sample = f"sequence of {workload['sequence_length']} tokens{alone}"
    return NamedModel(workload=workload, batch=1, sample=sample)


def _stored(name: str) -> tuple[str, Mapping[str, Any]]:
    """Return the name of a configuration and its content.

    Raises `InputError` for one that is neither in a file nor in the package.
    """
    bare = name.removeprefix(PREFIX)
    model, folder = f"{PREFIX}{bare}", Path(bare).expanduser()
    if model in HUGGING_FACE and shipped_name(bare) is None:  # a family, and no model's name
        return model, {}
    if (folder / "config.json").is_file():
        model = f"{PREFIX}{folder / 'config.json'}"  # weights do not change the answer
    elif not folder.is_file():
        model = f"{PREFIX}{shipped_name(bare) or bare}"
    try:
        stored = stored_configuration(model)
    except (OSError, ValueError) as error:
        raise InputError(name, str(error), "name a config.json of transformers") from error
    if stored is not None:
        return model, stored
    if folder.suffix == ".json":
        raise InputError(name, "no such file", "name a config.json that is there")
    names = (*HUGGING_FACE, *(f"{PREFIX}{other}" for other in shipped()))
    allowed = (
        f"get the configuration of a language model by `hf download {bare} config.json --local-dir"
        f" {folder.name}` (of a diffusion model: transformer/config.json), and name the folder:"
        f" `shardmark plan hf:{folder.name}`; name a model of images as torchvision or timm do"
        f" (timm:NAME){nearest(model, names, count=3)}"
    )
    raise InputError(name, "its sizes are not in the package", allowed)


def _of_user(name: str, sequence_length: int | None) -> NamedModel:
    """Return the workload of a task, or of a function or class that makes a model."""
    definition = user_definition(name)
    if isinstance(definition, ast.ClassDef):
        methods = {node.name for node in definition.body if isinstance(node, ast.FunctionDef)}
        if "forward" not in methods:
            return NamedModel(workload={"name": "own", "task": name}, batch=8, sample="sample")
        definition = next(
            (n for n in definition.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"),
            None,
        )
    arguments = definition.args if isinstance(definition, ast.FunctionDef) else None
    names = {a.arg for a in (*arguments.args, *arguments.kwonlyargs)} if arguments else set()
    if "vocabulary" not in names:
        return _of_pictures(name)
    length = sequence_length or 1024
    sizes = {"dataset": "random", "vocabulary": 32_000, "sequence_length": length}
    workload = {"name": "language", "model": name, **sizes}
    return NamedModel(workload=workload, batch=8, sample=f"sequence of {length} tokens")
