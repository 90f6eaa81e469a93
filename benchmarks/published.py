"""Published figures of training speed as questions to `shardmark plan`, with their step times.

A row becomes the arguments of the command (`question`), these a request, as the command line makes
it, and the request a step, whose traces are stored (`traced.py`).
"""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import typer
from benchmarks.traced import MODELS

from shardmark.base.errors import InputError, ShardmarkError
from shardmark.base.recipe import Recipe
from shardmark.cli import app
from shardmark.cli.plan import request_of
from shardmark.experiment.matrix import cells_of_any_size
from shardmark.predict.hardware.catalogue import (
    NodeType,
    joined_node,
    load_card,
    load_node,
    nodes_of,
)
from shardmark.predict.models import Models
from shardmark.predict.plan import Planner, planners_of
from shardmark.predict.profile import Profile
from shardmark.predict.request import PlanRequest
from shardmark.predict.timing import Stack
from shardmark.ranks.strategies.base import Strategy

COLUMNS = (
    *("id", "source", "model", "params_b", "task", "seq_len_or_image", "micro_batch"),
    *("global_batch", "precision", "strategy", "activation_checkpointing", "gpu", "n_gpus"),
    *("gpus_per_node", "interconnect", "throughput_value", "throughput_unit", "notes"),
)
"""Columns of a file.  `stack` and `question`, arguments of the command, are optional."""
CARDS = (
    (r"a100.*80.*pcie", "a100-pcie-80"), (r"a100.*pcie", "a100-pcie-40"),
    (r"a100.*80|a800", "a100-80"), (r"a100", "a100-40"), (r"v100.*pcie", "v100-pcie"),
    (r"v100.*32", "v100-32"), (r"v100", "v100-16"), (r"h100.*pcie", "h100-pcie"),
    (r"h100|h800", "h100"), (r"h200", "h200"), (r"b200", "b200"), (r"a10g", "a10g"),
    (r"a6000", "rtx-a6000"), (r"a5000", "rtx-a5000"), (r"a30\b", "a30"), (r"a40\b", "a40"),
    (r"a10\b", "a10"), (r"l40s", "l40s"), (r"l40\b", "l40"), (r"\bl4\b", "l4"),
    (r"6000 ada", "rtx-6000-ada"), (r"5090", "rtx-5090"), (r"4090", "rtx-4090"),
    (r"4070 ti", "rtx-4070-ti"), (r"3090", "rtx-3090"), (r"3080", "rtx-3080"),
    (r"rtx 8000", "rtx-8000"), (r"2080 ti", "rtx-2080-ti"), (r"1080 ti", "gtx-1080-ti"),
    (r"titan rtx", "titan-rtx"),
    (r"\bt4\b", "t4"), (r"p100", "p100"), (r"p40\b", "p40"), (r"k80", "k80"),
    (r"mi250", "mi250x"), (r"mi300", "mi300x"),
)  # fmt: skip
NODES = (
    (r"dgx-?2", "dgx-2"), (r"a100.*80", "dgx-a100-80"), (r"a100", "dgx-a100-40"),
    (r"v100.*32", "dgx-1-v100-32"), (r"v100", "dgx-1-v100-16"), (r"h100", "dgx-h100"),
    (r"h200", "dgx-h200"), (r"b200", "dgx-b200"), (r"p100", "dgx-1-p100"),
)  # fmt: skip
"""Nodes whose links and networks are assumed if a source names none."""
SECONDS = {"ms": 1e-3, "s": 1, "min": 60, "h": 3600}
USUAL_SEQUENCE = 512
USUAL_DEVICES = 8
ETHERNET_BYTES_PER_SECOND = 10e9 / 8
"""Assumed if a source states only Ethernet."""
REFUSED = (
    (
        r"\b(tp|pp|ep|mp)\s?=?[2-9]|(tensor|pipeline|model)[- ]?parallel|expert|\bmoe\b",
        "it divides layers or experts",
    ),
    (r"lora", "which parameters it trains is not stated"),
    (r"custom|dinov2|mlp, ", "it is no model that a question names"),
    (r"tensorpack|simpledet|caffe2|matterport", "its framework is not PyTorch"),
    (r"paged|cumulative: baseline|activation offloading|8-bit", "it pads, pages or offloads"),
    (
        r"pytorch loader|unpadded|host/io affected|input pipeline",
        "its source says that its data loader bounds it",
    ),
    (r"lamb.* 512 ", "its batches are of samples of like lengths"),
    (r"under torch\.profiler", "its source times it under a profiler"),
    (r"is per rank or global", "it does not state whether its speed is that of one GPU"),
    (r"async", "its workers do not wait for each other"),
)
STRATEGIES: tuple[tuple[str, str], ...] = (
    (r"zero-?\s?([0123])", r"zero-\1"),
    (r"hsdp|hybrid_?shard", "fsdp-hybrid"),
    (r"shard_grad_op", "fsdp-grad-op"),
    (r"shardedddp", "zero-2"),
    (r"fsdp|fully.?sharded", "fsdp"),
    (r"dataparallel(?!.*dist)", "dp"),
    # TensorFlow's towers and servers overlap their exchange with the backward pass, as `ddp` does.
    (r"ddp|data parallel|distributed|horovod|all-?reduce|replicated|parameter server", "ddp"),
    (r"single|none|baseline", "single"),
)
INFINIBAND_RATES = {"fdr": "56 Gb/s", "edr": "100 Gb/s", "hdr": "200 Gb/s", "ndr": "400 Gb/s"}
INFINIBAND = re.compile(r"(?<!Gb/s )\b(fdr|edr|hdr|ndr)\b", re.IGNORECASE)
LOADER = re.compile(r"(?<!\S)(\S+) sections are data-loader bound.*section: [^;]*\1\b")
PICTURES = (
    (r"resnext-?101.*32x4d", "timm:resnext101_32x4d"),
    (r"resnet-?(18|34|50|101|152)\b", r"resnet\1"),
    (r"convnext.?large", "convnext_large"), (r"regnet_?y.?128gf", "regnet_y_128gf"),
    (r"efficientnet-b(\d)", r"efficientnet_b\1"), (r"vgg(\d\d)$", r"vgg\1"),
    (r"mobilenetv2", "mobilenet_v2"), (r"alexnet", "alexnet"),
    (r"inception-?v?3", "inception_v3"),
    (r"vit.?(base|b).*32", "vit_b_32"), (r"vit.?(large|l).*16", "vit_l_16"),
)  # fmt: skip
"""Names of picture models by patterns of those in the rows."""
DETECTORS = (
    (r"faster.*(r_?50|resnet-50).fpn", "fasterrcnn_resnet50_fpn"),
    (r"faster.*r_101_fpn", "fasterrcnn_resnet101_fpn"),
    (r"faster.*mobilenetv3-large fpn", "fasterrcnn_mobilenet_v3_large_fpn"),
    (r"faster.*mobilenetv3-large 320", "fasterrcnn_mobilenet_v3_large_320_fpn"),
    (r"mask.*(r_?50|resnet-50).fpn", "maskrcnn_resnet50_fpn"),
    (r"retinanet.*(r_50|resnet-50).fpn", "retinanet_resnet50_fpn"),
)
"""Detectors of torchvision by patterns of names in the rows."""
JITTERED_SIDE = 831
"""Side of a square with the area of images of 3 to 4 whose shorter side is 640 to 800 pixels."""
SIZES = {"efficientnet_b4": 380}
"""Pixels of pictures that a source does not state, if they are not the model's usual ones."""
TEXTS = (
    (r"bert.?large|megatron bert", "hf:google-bert/bert-large-uncased"),
    (r"bert.?base", "hf:google-bert/bert-base-uncased"),
    (r"tinyllama", "hf:TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    (r"llama-3.2-3b", "hf:meta-llama/Llama-3.2-3B"),
    (r"llama.?3(.1)?.?70b", "hf:meta-llama/Meta-Llama-3-70B"),
    (r"llama.?3(.1)?.?8b", "hf:meta-llama/Meta-Llama-3-8B"),
    (r"llama.?2.?70b", "hf:meta-llama/Llama-2-70b-hf"),
    (r"llama.?2.?13b", "hf:meta-llama/Llama-2-13b-hf"),
    (r"llama.?2.?7b|granite 7b", "hf:meta-llama/Llama-2-7b-hf"),
    (r"gpt-?2.?large", "hf:openai-community/gpt2-large"),
    (r"gpt-?2.?medium", "hf:openai-community/gpt2-medium"),
    (r"gpt-?2( small| 124m)?$|nanogpt", "hf:openai-community/gpt2"),
    (r"gpt-2 xl", "hf:openai-community/gpt2-xl"),
)
SHAPES = (
    (r"mpt-?125m", 12, 768), (r"mpt-?350m", 24, 1024), (r"mpt-?760m", 24, 1536),
    (r"mpt-?1b", 24, 2048), (r"mpt-?3b", 32, 2560), (r"mpt-?7b", 32, 4096),
    (r"mpt-?13b", 40, 5120), (r"mpt-?30b", 48, 7168), (r"mpt-?70b", 80, 8192),
    (r"transformer-?xl.*large", 18, 1024), (r"transformer-?xl", 16, 512),
    (r"transformer.*big", 12, 1024), (r"gpt-?2.?xxl", 96, 1600), (r"gpt-?2.?xl", 48, 1600),
)  # fmt: skip
"""Layers and widths of language models that have no name of their own in the package, which are
asked as a GPT-2 of these sizes, with their activation in one kernel: GPT-2's own GELU is eight."""
PARAMETERS = {"transformer-xl base": 192e6, "transformer-xl large": 257e6, "transformer big": 213e6}
SEQUENCES = {
    **{"transformer-xl base": 192, "transformer-xl large": 384, "transformer big": 32},
    **{"gpt2-xl": 1024, "gpt2-xxl": 1024, "tinyllama": 2048},
}
"""Tokens of a sample, if a source does not state them."""
HEAD = 64
ASPECT = 100
"""Width over layers of a transformer of which only the size is known."""
FUSED = (
    r"llm-foundry|torchtitan|torchtune|llm\.c|olmo|modded-nanogpt|oumi|deepspeed-to-fsdp|tinyllama|"
    r"gpt2-124m|muon|kempner|fms-fsdp|megatron-bridge|pith-train"
)
"""Sources of software that does not store the scores of attention, whose stack is `fused`."""
TF32 = r"deeplearningexamples|lambdal"
"""Sources whose containers multiply in TF32 by default."""


@dataclass(frozen=True, slots=True)
class Question:
    """The arguments of `shardmark plan` for a row, and what they leave out."""

    arguments: tuple[str, ...]
    samples: int
    """Samples of a rank in a step."""
    assumed: bool
    """True if the source states no batch, no length of sequences, or no model that has a name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One published figure."""

    row: dict[str, str]
    question: Question
    planner: Planner
    profile: Profile
    ranks: int
    nodes: int
    seconds: float
    """Published time of a step."""

    @property
    def recipe(self) -> Recipe:
        return self.planner.cell.recipe

    @property
    def strategy(self) -> Strategy:
        return self.planner.cell.built_strategy

    @property
    def node(self) -> NodeType:
        return self.planner.node

    @property
    def stack(self) -> Stack:
        return self.planner.request.stack or "eager"

    @property
    def is_text(self) -> bool:
        return bool(self.profile.tokens_per_sample)

    @property
    def assumed(self) -> bool:
        return self.question.assumed

    @property
    def micro_batch(self) -> int:
        return self.question.samples // self.recipe.gradient_accumulation

    @property
    def samples_per_second(self) -> float:
        """Published speed of a rank."""
        return self.question.samples / self.seconds


def read(path: Path, models: Models = MODELS) -> tuple[list[Case], list[tuple[str, str]]]:
    """Cases of a file, and ids of unusable rows with the reason."""
    cases, refused = [], []
    for row in rows_of(path):
        try:
            cases.append(case_of(row, models))
        except (ValueError, ShardmarkError) as error:
            refused.append((row["id"], str(error)))
    return cases, refused


def rows_of(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    missing = [name for name in COLUMNS if rows and name not in rows[0]]
    if missing:
        raise SystemExit(f"{path}: it has no column {', '.join(missing)}")
    for row in rows:
        yield {"stack": "", "question": ""} | {k: (v or "").strip() for k, v in row.items()}


def case_of(row: dict[str, str], models: Models) -> Case:
    """The case of a row; raises `ValueError` with the missing fact."""
    question = question_of(row)
    ranks, per_node = _sizes(row)
    request, planners = planner_of(question.arguments, models)
    (planner,) = planners
    profile = planner.profile(ranks, ranks // per_node)
    assert request.stack is not None, "a resolved request"
    return Case(
        row=row,
        question=question,
        planner=planner,
        profile=profile,
        ranks=ranks,
        nodes=ranks // per_node,
        seconds=_step_seconds(
            row,
            _number(row["throughput_value"]) or 0.0,
            ranks=ranks,
            samples=question.samples,
            tokens=profile.tokens_per_sample or 1,
            profile=profile,
        ),
    )


@cache
def _command() -> Any:
    group: Any = typer.main.get_command(app)
    return group.commands["plan"]


def planner_of(arguments: Iterable[str], models: Models) -> tuple[PlanRequest, list[Planner]]:
    """The planners of the arguments of `shardmark plan`, as the command line makes them."""
    context = _command().make_context("plan", [*arguments])
    request = request_of(context.params).resolved()
    name, count = nodes_of(request.machines[0])
    node, _ = joined_node(name, count or 1)
    cells, _ = cells_of_any_size(request.experiment)
    return request, planners_of(request, node, cells, models, request.constants)


def question_of(row: dict[str, str]) -> Question:
    """The question of a row; raises `ValueError` with the missing fact."""
    if not _number(row["throughput_value"]):
        raise ValueError("no speed is stated")
    if LOADER.search(row["notes"]):
        raise ValueError("its source says that its data loader bounds it")
    if "timed steps contain evaluations" in row["notes"]:
        raise ValueError("its times contain evaluations")
    ranks, per_node = _sizes(row)
    said = f"{row['strategy']} {row['task']} {row['model']}".lower()
    whole = f"{said} {row['seq_len_or_image']} {row['notes'].lower()}"
    for pattern, reason in () if row["question"] else REFUSED:
        if re.search(pattern, whole):
            raise ValueError(reason)
    card = _first(CARDS, row["gpu"].lower(), "the card is not stated, or not one of ours")
    model, tokens, assumed = _model(row)
    micro, passes, no_batch = _batch(row, ranks, tokens)
    settings = {
        "matrix.strategy": json.dumps([_strategy(row, said, ranks, per_node)]),
        "recipe.gradient_accumulation": str(passes),
    }
    if "offload" in said:
        settings["recipe.cpu_offload"] = "true"
    if "nhwc" in f"{row['precision']} {row['notes']}".lower():
        settings["recipe.channels_last"] = "true"
    if found := re.match(r"full|selective", row["activation_checkpointing"].lower()):
        settings["recipe.activation_checkpointing"] = "true" if found[0] == "full" else "selective"
    if re.search(r"torch\.compile|\+compile|, compile|cumulative: \+(chunk|activ|optim)", whole):
        settings["recipe.compile"] = "model"
    precision = _precision(row, card, is_text=tokens > 1)
    settings |= {key: value for key, value in precision.items() if "." in key}
    machine = _machine(row, card, per_node)
    nodes = ranks // per_node
    arguments = [
        *model,
        *("--on", machine if nodes == 1 else f"{nodes}x{machine}"),
        *("--batch", str(micro * passes)),
        *(word for key, value in precision.items() if "." not in key for word in (key, value)),
        *(word for key, value in settings.items() for word in ("--set", f"{key}={value}")),
        *shlex.split(row["question"])[1:],
    ]
    return Question(tuple(arguments), micro * passes, assumed or no_batch)


def _sizes(row: dict[str, str]) -> tuple[int, int]:
    """Ranks, and those of a node."""
    ranks = int(_number(row["n_gpus"]) or 0)
    if not ranks:
        raise ValueError("the number of GPUs is not stated")
    per_node = min(ranks, int(_number(row["gpus_per_node"]) or USUAL_DEVICES))
    if ranks % per_node:
        raise ValueError("its nodes do not have equally many ranks")
    return ranks, per_node


def _model(row: dict[str, str]) -> tuple[list[str], int, bool]:
    """Arguments that name the model, tokens of a sample (1 for pictures), and whether assumed."""
    name = row["model"].lower()
    if row["question"]:
        sequence = int(_number(row["seq_len_or_image"]) or 1)
        length = ["--sequence-length", str(sequence)] if sequence > 1 else []
        asked = [shlex.split(row["question"])[0], *length]
        return [*asked, *(["--stack", row["stack"]] if row["stack"] else [])], sequence, False
    if re.search(r"detect|segment", row["task"].lower()):
        detector = next((other for pattern, other in DETECTORS if re.search(pattern, name)), None)
        if detector is None:
            raise ValueError("it is no detector of torchvision")
        jittered = "640-800" in row["seq_len_or_image"]
        smaller = ["--set", f"workload.min_size={JITTERED_SIDE}"] if jittered else []
        return [detector, *smaller], 1, False
    prefix = "timm:" if "pytorch-image-models" in row["source"] else ""
    picture = next((o for p, o in PICTURES if not prefix and re.search(p, name)), None)
    if picture or prefix or re.search(r"classification( \(|$| i| c)", row["task"].lower()):
        found = re.search(next((p for p, o in PICTURES if o == picture), "$^"), name)
        model = found.expand(picture) if found and picture else prefix + name
        stated = re.match(r"(\d+)x", row["seq_len_or_image"])
        size = int(stated[1]) if stated else SIZES.get(model)
        return [model, *(["--set", f"workload.image_size={size}"] if size else [])], 1, False
    arguments = _text_model(row, name)
    sequence, stated_length = _sequence(row, name)
    stack = row["stack"] or ("fused" if re.search(FUSED, row["source"], re.I) else "eager")
    arguments += ["--sequence-length", str(sequence), "--stack", stack]
    return arguments, sequence, not stated_length


def _text_model(row: dict[str, str], name: str) -> list[str]:
    """Arguments for a language model: its name, or a GPT-2 of its sizes."""
    of_shape = next(((layers, width) for p, layers, width in SHAPES if re.search(p, name)), None)
    shipped = None if of_shape else next((m for p, m in TEXTS if re.search(p, name)), None)
    if shipped is not None:
        few = re.search(r"squad|question answering", f"{name} {row['task']}".lower())
        return [shipped, *(["--set", "workload.vocabulary=256"] if few else [])]
    said_size = re.search(r"([\d.]+)b\b", name)
    billions = _number(row["params_b"]) or (float(said_size[1]) if said_size else None)
    parameters = billions * 1e9 if billions else _known(PARAMETERS, name)
    if parameters is None:
        raise ValueError("the model's size is not stated")
    if of_shape is None:
        width = HEAD * max(1, round((parameters * ASPECT / 12) ** (1 / 3) / HEAD))
        of_shape = (max(1, width // ASPECT), width)
    layers, width = of_shape
    vocabulary = max(256, round((parameters - 12 * layers * width**2) / width))
    sizes: dict[str, object] = {"n_layer": layers, "n_embd": width, "n_head": width // HEAD}
    sizes |= {"n_positions": 65536}
    sizes |= {} if "gpt" in name and "gpt-3" not in name else {"activation_function": "gelu"}
    return [
        "hf:gpt2",
        *(w for k, v in sizes.items() for w in ("--set", f"workload.model_options.{k}={v}")),
        *("--set", f"workload.vocabulary={vocabulary}"),
    ]


def _known(values: dict[str, Any], name: str) -> Any:
    return next((value for key, value in values.items() if re.match(key, name)), None)


def _sequence(row: dict[str, str], name: str) -> tuple[int, bool]:
    """Tokens of a sample, and whether they are stated; a usual number if nothing is in tokens."""
    stated = re.match(r"(\d+)(?!\d|\s*x|\s+\w+/GPU)", row["seq_len_or_image"])
    if stated:
        return int(stated[1]), True
    known = _known(SEQUENCES, name)
    if known is None and "token" in row["throughput_unit"]:
        raise ValueError("the length of its sequences is not stated")
    return known or USUAL_SEQUENCE, bool(re.search(r"\d", row["seq_len_or_image"]))


def _strategy(row: dict[str, str], said: str, ranks: int, per_node: int) -> object:
    offloads = "offload" in said
    name = "single" if ranks == 1 and not offloads else None
    for pattern, replacement in STRATEGIES if name is None else ():
        if found := re.search(pattern, row["strategy"].lower()):
            name = found.expand(replacement)
            break
    if name is None:
        raise ValueError("its strategy is not one of ours")
    if offloads and not name.startswith(("fsdp", "zero-")):
        raise ValueError(f"it offloads, which {name} does not")
    return {"name": name, "shard_group": per_node} if name == "fsdp-hybrid" else name


def _precision(row: dict[str, str], card: str, *, is_text: bool) -> dict[str, str]:
    """Option and keys of the precision; nothing if the source does not state it.

    On Ampere and later, convolutions in fp32 multiply in TF32 by default, and other products do in
    containers of NVIDIA.
    """
    said = row["precision"].lower()
    if "fp8" in said:
        raise ValueError("fp8 is not predicted")
    if not said or said == "mixed":
        return {}
    pure = {"recipe.weights": "bf16"} if "pure" in said and "bf16" in said else {}
    peaks = load_card(card)
    if not re.match(r"[tf]f?p?32", said) and re.search(r"bf16|fp16|amp|mixed|half|16", said):
        wanted = "bf16" if "bf16" in said else "fp16"
        for precision in (wanted, "fp16", "fp32"):
            with suppress(InputError):
                peaks.peak(precision)
                return {"--precision": precision} | (pure if precision == "bf16" else {})
    by_default = not is_text or re.search(TF32, row["source"], re.IGNORECASE)
    tf32 = said.startswith("tf32") or (by_default and "no tf32" not in said)
    return {"--precision": "fp32", "recipe.tf32": str(bool(tf32)).lower()}


def _batch(row: dict[str, str], ranks: int, tokens: int) -> tuple[int, int, bool]:
    """Samples of a pass, passes of a step, and whether they are assumed."""
    micro, whole = _number(row["micro_batch"]), _number(row["global_batch"])
    per_gpu = re.match(r"(\d+) tokens/GPU", row["seq_len_or_image"])
    if per_gpu:
        return max(1, int(per_gpu[1]) // tokens), 1, False
    told = re.search(r"grad(?:ient)?[_ ]accum\w* (\d+)", row["notes"])
    if micro is None:
        if whole is None:
            return 32, 1, True
        micro = max(1.0, whole / ranks / (int(told[1]) if told else 1))
    if told:
        return int(micro), max(1, int(told[1])), False
    return int(micro), max(1, round((whole or 0) / micro / ranks)), False


def _step_seconds(
    row: dict[str, str], value: float, *, ranks: int, samples: int, tokens: float, profile: Profile
) -> float:
    """Step time from a time of steps or epochs, from a rate of all ranks or one, or from FLOP/s."""
    unit = row["throughput_unit"].lower()
    timed = re.match(r"(ms|s|min|h)(/iter|/step| per (\d+) steps|/epoch| per \d+ samples)", unit)
    if timed:
        seconds = value * SECONDS[timed[1]]
        if timed[3] or timed[2] in ("/iter", "/step"):
            return seconds / int(timed[3] or 1)
        told = f"{row['notes']} {row['seq_len_or_image']} {unit}"
        epoch = re.search(r"([\d,]+) (?:train )?(?:imgs|images|samples)", told)
        if not epoch:
            raise ValueError("the samples of an epoch are not stated")
        return seconds * samples * ranks / float(epoch[1].replace(",", ""))
    if re.match(r"(it|iter\w*|steps?)/s", unit):
        return 1 / value
    each = value if re.search(r"(/|per )(gpu|device|accelerator|chip)", unit) else value / ranks
    rate = re.match(r"(img|image|seq|sample|example|sentence|token)\w*/s", unit)
    if rate:
        return samples * (tokens if rate[1] == "token" else 1) / each
    if unit.startswith("tflop"):
        return _flops(profile, samples) / (each * 1e12)
    raise ValueError(f"its speed is in {row['throughput_unit'] or 'no unit'}")


def _machine(row: dict[str, str], card: str, per_node: int) -> str:
    """File of a node with the links and network of the source, or those of the usual node."""
    said = row["interconnect"]
    usual = next((name for pattern, name in NODES if re.search(pattern, row["gpu"].lower())), None)
    node = load_node(usual) if usual else load_node(f"{card}x{per_node}")
    network = node.node.network_bytes_per_second or 100e9 / 8
    told = INFINIBAND.sub(lambda found: INFINIBAND_RATES[found[0].lower()], said)
    stated = re.search(
        r"(?:(\d+)\s*x\s*)?([\d.]+)\s*([GT])b(?!y)(\S*?\s*(?:/|per|each)\s*(?:gpu|card|rank))?",
        told,
        re.IGNORECASE,
    )
    if stated:
        links = int(stated[1] or 1) * (per_node if stated[4] else 1)
        network = links * float(stated[2]) * {"G": 1e9, "T": 1e12}[stated[3].upper()] / 8
    elif "ethernet" in said.lower():
        network = ETHERNET_BYTES_PER_SECOND
    kept = dict(node.node.link_bytes_per_second_by_ranks)
    if re.search(r"pcie|p2p_disable|none", said.lower()) and "nvlink" not in said.lower():
        host = load_card(card).host_bytes_per_second
        kept = {max(2, per_node): host} if host else kept
    content = {
        "card": card,
        "devices": per_node,
        "link_bytes_per_second_by_ranks": kept,
        "network_bytes_per_second": network,
    }
    text = json.dumps(content)
    file = _folder() / f"{sha256(text.encode()).hexdigest()[:12]}.yaml"
    if not file.exists():
        file.write_text(text)
    return str(file)


@cache
def _folder() -> Path:
    return Path(mkdtemp(prefix="nodes"))


def _first(table: tuple[tuple[str, str], ...], text: str, otherwise: str) -> str:
    for pattern, name in table:
        if re.search(pattern, text):
            return name
    raise ValueError(otherwise)


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _flops(profile: Profile, samples: float) -> float:
    return sum(
        operation.flops.at(samples)
        for unit in profile.units
        for operation in (*unit.forward, *unit.backward)
    )
