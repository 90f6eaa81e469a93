"""Published figures of training speed as cases: the training, the machine, and its step time.

Profiles of picture models are traced (`traced.py`).  Those of others come from formulas:
multiplications and activations are those of their papers and of timm's tables; stages are shares of
parameters and of work, first layers first.
"""

from __future__ import annotations

import csv
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.traced import key_of, load

from shardmark.base.errors import InputError
from shardmark.base.recipe import Optimizer, Recipe
from shardmark.base.traffic import ModelSize
from shardmark.predict.hardware.catalogue import Node, NodeType, load_card, load_node
from shardmark.predict.profile import Amount, Kind, Operation, Profile, Unit
from shardmark.ranks.strategies import build_strategy
from shardmark.ranks.strategies.base import Strategy

COLUMNS = (
    *("id", "source", "model", "params_b", "task", "seq_len_or_image", "micro_batch"),
    *("global_batch", "precision", "strategy", "activation_checkpointing", "gpu", "n_gpus"),
    *("gpus_per_node", "interconnect", "throughput_value", "throughput_unit", "notes"),
)
CARDS = (
    (r"a100.*80.*pcie", "a100-pcie-80"), (r"a100.*pcie", "a100-pcie-40"),
    (r"a100.*80", "a100-80"), (r"a100", "a100-40"), (r"v100.*pcie", "v100-pcie"),
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
    (r"paged|cumulative: baseline|activation offloading|8-bit", "it pads, pages or offloads"),
    (r"pytorch loader|unpadded|host/io affected", "its source says that its data loader bounds it"),
    (r"lamb.* 512 ", "its batches are of samples of like lengths"),
    (r"under torch\.profiler", "its source times it under a profiler"),
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
EVEN = ((1 / 8, 1 / 8),) * 8
RESNET = ((0.01, 0.20), (0.05, 0.25), (0.28, 0.33), (0.58, 0.21), (0.08, 0.01))
ACCESSES = 6
"""Reads and writes of an activation in a forward pass: of convolution, norm and nonlinearity."""
INFINIBAND_RATES = {"fdr": "56 Gb/s", "edr": "100 Gb/s", "hdr": "200 Gb/s", "ndr": "400 Gb/s"}
INFINIBAND = re.compile(r"(?<!Gb/s )\b(fdr|edr|hdr|ndr)\b", re.IGNORECASE)
LOADER = re.compile(r"(?<!\S)(\S+) sections are data-loader bound.*section: [^;]*\1\b")


@dataclass(frozen=True, slots=True)
class Pictures:
    """A convolutional network at its usual resolution."""

    pattern: str
    million_parameters: float
    giga_products: float
    """Multiplications of a forward pass of one image, in 10^9."""
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
    """Tokens of a sample, if the source does not state them."""


TRACED = (
    (r"resnext-?101.*32x4d", "timm:resnext101_32x4d"),
    (r"mask|faster|keypoint|retina|ssd|custom", ""),
    (r"resnet-?(18|34|50|101|152)\b", r"resnet\1"), (r"convnext.?large", "convnext_large"),
    (r"regnet_?y.?128gf", "regnet_y_128gf"), (r"efficientnet-b(\d)", r"efficientnet_b\1"),
    (r"vgg(\d\d)$", r"vgg\1"), (r"alexnet", "alexnet"), (r"inception-?v?3", "inception_v3"),
)  # fmt: skip
"""Names of traced models by patterns; other models may have the very name of a traced one."""
SIZES = {"efficientnet_b4": 380, "inception_v3": 299}
"""Pixels of pictures that a source does not state."""
PICTURES = (
    Pictures(r"mask.?r-?cnn|keypoint", 44.4, 134, 330),
    Pictures(r"faster.?r-?cnn|retinanet|cascade", 41.8, 134, 330),
    Pictures(r"ssd300", 22.9, 13, 40),
    Pictures(r"resnext-?101", 44.2, 8.0, 21.2, RESNET),
    Pictures(r"resnet-?50", 25.6, 4.1, 11.1, RESNET),
    Pictures(r"vit.?(base|b).*32", 88.2, 4.4, 5.0),
    Pictures(r"vit.?(large|l).*16", 304.3, 61.6, 63.5),
)
TEXT = (
    Text(r"mpt-?125m", 12, 768), Text(r"mpt-?350m", 24, 1024), Text(r"mpt-?760m", 24, 1536),
    Text(r"mpt-?1b", 24, 2048), Text(r"mpt-?3b", 32, 2560), Text(r"mpt-?7b", 32, 4096),
    Text(r"mpt-?13b", 40, 5120), Text(r"mpt-?30b", 48, 7168), Text(r"mpt-?70b", 80, 8192),
    Text(r"bert.?large|megatron bert", 24, 1024, 336, 512), Text(r"bert.?base", 12, 768, 110, 512),
    Text(r"transformer-?xl.*large", 18, 1024, 257, 384),
    Text(r"transformer-?xl", 16, 512, 192, 192), Text(r"transformer.*big", 12, 1024, 213, 32),
    Text(r"gpt-?2.?xxl", 48, 2240, 2900, 1024),
    Text(r"gpt-?2.?xl", 48, 1600, 1558, 1024), Text(r"gpt-?2.?large", 36, 1280, 774, 1024),
    Text(r"gpt-?2.?medium", 24, 1024, 355, 1024), Text(r"gpt-?2|nanogpt", 12, 768, 124, 1024),
    Text(r"tinyllama", 22, 2048, 1100, 2048), Text(r"llama.*70b", 80, 8192, 70600),
    Text(r"llama.*13b", 40, 5120, 13016), Text(r"llama.*[78]b", 32, 4096, 6738),
)  # fmt: skip
Work = tuple[Kind, float, float, float, int]
"""Kind, FLOPs, bytes and fixed bytes of forward operations, and their number."""
HEAD = 64
OTHER_FUSED, OTHER_EAGER = 20, 60
"""Accesses to an activation by a block's operations beside products and attention."""
SCORE_ACCESSES = 8
LOSS_BYTES = 22
"""Bytes moved for each logit by the loss."""
FUSED = (
    r"torch\.compile|\+compile|, compile|cumulative: \+(chunked|activation|optimizer)|"
    r"llm-foundry|megatron|deepspeed kernel|deeplearningexamples"
)
OLD_ATTENTION = r"deeplearningexamples|perf_train_gpu|v100|titan rtx|gpt-2 large"
"""Sources that store the scores of attention: older than its fused kernels in torch."""
ASPECT = 100
"""Width over layers of a transformer of which only the size is known."""


def profile_of(
    row: dict[str, str], precision: str, sequence: int | None, *, pictures: bool
) -> tuple[Profile, int]:
    """The profile of a row's model, and the tokens of a sample (1 for pictures).

    `pictures` is true if an unknown model is a vision model.  Raises `ValueError` if its size or
    the length of its sequences is not known.
    """
    name = row["model"].lower()
    said_size = re.search(r"([\d.]+)b\b", name)
    params = _number(row["params_b"]) or (float(said_size[1]) if said_size else None)
    profile = _traced(row, precision)
    if profile is not None:
        return profile, 1
    width_bytes = 4 if precision == "fp32" else 2
    for picture in PICTURES:
        if re.search(picture.pattern, name):
            return _of_pictures(picture, params and 1e3 * params, width_bytes), 1
    text = next((each for each in TEXT if re.search(each.pattern, name)), None)
    millions = 1e3 * params if params else (text.million_parameters if text else None)
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
    said = " ".join(row.values()).lower()
    return (
        _of_text(
            text,
            millions * 1e6,
            tokens,
            width_bytes,
            fused=_is_fused(row),
            causal=not re.search(r"bert|t5|translation", said),
            stores_scores="attention not fused" in said or bool(re.search(OLD_ATTENTION, said)),
        ),
        tokens,
    )


def _is_fused(row: dict[str, str]) -> bool:
    said = " ".join(row.values()).lower()
    return bool(re.search(FUSED, said)) and "without compile" not in said


def _traced(row: dict[str, str], precision: str) -> Profile | None:
    name = row["model"].lower()
    model, prefix = name, "timm:" if "pytorch-image-models" in row["source"] else ""
    for pattern, replacement in () if prefix else TRACED:
        if found := re.search(pattern, name):
            model = found.expand(replacement)
            break
    stated = re.match(r"(\d+)x", row["seq_len_or_image"])
    size = int(stated[1]) if stated else SIZES.get(model, 224)
    return load(key_of(prefix + model, size, precision))


def _of_pictures(of: Pictures, millions: float | None, width_bytes: int) -> Profile:
    parameters = 1e6 * (millions or of.million_parameters)
    activations = 1e6 * of.million_activations * width_bytes
    return _profile(
        [
            (
                parameters * part,
                [
                    ("convolution", 2e9 * of.giga_products * work, 2 * activations * work, 0.0, 30),
                    ("other", 0.0, (ACCESSES - 2) * activations * work, 0.0, 60),
                ],
            )
            for part, work in of.stages
        ]
    )


def _of_text(
    of: Text,
    parameters: float,
    tokens: int,
    width_bytes: int,
    *,
    fused: bool,
    causal: bool,
    stores_scores: bool,
) -> Profile:
    """A transformer whose head is the embedding, its gradient complete after the backward pass.

    Other operations move as many bytes as in traces of GPT-2: a compiler leaves a sixth of them.
    """
    width, block = of.width, 12 * of.width**2
    between = max(0.0, parameters - of.layers * block)
    one = tokens * width * width_bytes
    products: list[Work] = [
        (
            "product",
            2.0 * tokens * width**2 * factor,
            one * moved,
            width_bytes * factor * width**2,
            1,
        )
        for factor, moved in ((3, 4), (1, 2), (4, 5), (4, 5))
    ]
    scores = 4.0 * tokens**2 * width
    heads = max(1, width // HEAD)
    attention: list[Work] = [("attention", scores / (2 if causal else 1), 4.0 * one, 0.0, 1)]
    if stores_scores:
        stored = SCORE_ACCESSES * tokens**2 * heads * width_bytes
        attention = [("product", scores, 4.0 * one, 0.0, 2), ("other", 0.0, stored, 0.0, 6)]
    accesses, calls = (OTHER_FUSED, 4) if fused else (OTHER_EAGER, 20)
    other: Work = ("other", 0.0, accesses * one, 0.0, calls)
    vocabulary = between / width
    head: list[Work] = [
        (
            "product",
            2 * tokens * between,
            tokens * vocabulary * width_bytes,
            width_bytes * between,
            1,
        ),
        ("other", 0.0, LOSS_BYTES * tokens * vocabulary, 0.0, 6),
    ]
    blocks = [(block, [*products, *attention, other])] * of.layers
    return _profile([(between, [("other", 0.0, 4.0 * one, 0.0, 4)]), *blocks, (0.0, head)])


def _profile(units: list[tuple[float, list[Work]]]) -> Profile:
    """A profile from parameters and forward operations of each unit."""

    def operations(works: list[Work], times: int) -> tuple[Operation, ...]:
        return tuple(
            Operation(
                kind=kind,
                flops=Amount(per_sample=times * flops),
                bytes=Amount(per_sample=times * moved, fixed=times * fixed),
                calls=times * calls,
            )
            for kind, flops, moved, fixed, calls in works
        )

    made = tuple(
        Unit(
            name=str(number),
            parameters=round(parameters),
            trained_parameters=round(parameters),
            forward=operations(works, 1),
            backward=operations(works, 2),
        )
        for number, (parameters, works) in enumerate(units)
    )
    total = sum(unit.parameters for unit in made)
    return Profile(units=made, size=ModelSize(parameters=total, trained_parameters=total))


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One published figure."""

    row: dict[str, str]
    profile: Profile
    strategy: Strategy
    recipe: Recipe
    ranks: int
    nodes: int
    node: NodeType
    card: str
    seconds: float
    """Published time of a step."""
    is_text: bool
    fused: bool
    """True if a compiler or fused kernels compute what is between products."""
    assumed: bool
    """True if the source states no batch or no length of sequences, or the model was not traced."""

    @property
    def micro_batch(self) -> int:
        assert self.recipe.per_rank_batch is not None
        return self.recipe.per_rank_batch // self.recipe.gradient_accumulation

    @property
    def samples_per_second(self) -> float:
        """Published speed of a rank."""
        assert self.recipe.per_rank_batch is not None
        return self.recipe.per_rank_batch / self.seconds


def read(path: Path) -> tuple[list[Case], list[tuple[str, str]]]:
    """Cases of a file, and ids of unusable rows with the reason."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    missing = [name for name in COLUMNS if rows and name not in rows[0]]
    if missing:
        raise SystemExit(f"{path}: it has no column {', '.join(missing)}")
    cases, refused = [], []
    for row in rows:
        try:
            cases.append(case_of({key: (value or "").strip() for key, value in row.items()}))
        except (ValueError, InputError) as error:
            refused.append((row["id"], str(error)))
    return cases, refused


def case_of(row: dict[str, str]) -> Case:
    """The case of a row; raises `ValueError` with the missing fact."""
    value = _number(row["throughput_value"])
    if not value:
        raise ValueError("no speed is stated")
    if LOADER.search(row["notes"]):
        raise ValueError("its source says that its data loader bounds it")
    ranks = int(_number(row["n_gpus"]) or 0)
    if not ranks:
        raise ValueError("the number of GPUs is not stated")
    said = f"{row['strategy']} {row['task']} {row['model']}".lower()
    whole = f"{said} {row['seq_len_or_image']} {row['notes'].lower()}"
    for pattern, reason in REFUSED:
        if re.search(pattern, whole):
            raise ValueError(reason)
    card = _first(CARDS, row["gpu"].lower(), "the card is not stated, or not one of ours")
    precision = _precision(row["precision"].lower(), card)
    profile, tokens = profile_of(
        row,
        precision["precision"],
        _sequence(row),
        pictures=bool(re.search(r"classification \(|imagenet|cifar|detect|segment|image", said)),
    )
    micro, passes, assumed = _batch(row, ranks, tokens)
    offloads = "offload" in said
    profile = replace(profile, state_values=2 if tokens > 1 else 1)  # Adam's, and momentum's
    recipe = Recipe(
        steps=1,
        cpu_offload=offloads,
        channels_last="nhwc" in f"{row['precision']} {row['notes']}".lower(),
        per_rank_batch=micro * passes,
        gradient_accumulation=passes,
        activation_checkpointing=row["activation_checkpointing"].lower().startswith("full"),
        optimizer=Optimizer(name="adamw" if tokens > 1 else "sgd"),
        **precision,
    )
    per_node = int(_number(row["gpus_per_node"]) or min(ranks, USUAL_DEVICES))
    nodes = -(-ranks // per_node)
    if nodes * per_node != ranks and nodes > 1:
        raise ValueError("its nodes do not have equally many ranks")
    name = "single" if ranks == 1 and not offloads else _strategy(row["strategy"].lower())
    if offloads and not name.startswith(("fsdp", "zero-")):
        raise ValueError(f"it offloads, which {name} does not")
    options = {"shard_group": per_node} if name == "fsdp-hybrid" else {}
    return Case(
        row=row,
        profile=profile,
        strategy=build_strategy(name, options),
        recipe=recipe,
        ranks=ranks,
        nodes=nodes,
        node=_node(row, card, per_node),
        card=card,
        seconds=_step_seconds(
            row,
            value,
            ranks=ranks,
            samples=micro * passes,
            tokens=tokens,
            profile=profile,
        ),
        is_text=tokens > 1,
        fused=_is_fused(row),
        assumed=assumed
        or (tokens == 1 and _traced(row, recipe.precision) is None)
        or (tokens > 1 and not re.search(r"\d", row["seq_len_or_image"])),
    )


def _sequence(row: dict[str, str]) -> int | None:
    """Tokens of a sample; a usual number if the speed is not in tokens."""
    stated = re.match(r"(\d+)(?!\d|\s*x|\s+\w+/GPU)", row["seq_len_or_image"])
    if stated:
        return int(stated[1])
    return None if "token" in row["throughput_unit"] else USUAL_SEQUENCE


def _strategy(said: str) -> str:
    for pattern, name in STRATEGIES:
        found = re.search(pattern, said)
        if found:
            return found.expand(name)
    raise ValueError("its strategy is not one of ours")


def _precision(said: str, card: str) -> dict[str, Any]:
    """Precision keys of the recipe; fp32 on Ampere and later usually multiplies in TF32."""
    if "fp8" in said:
        raise ValueError("fp8 is not predicted")
    peaks = load_card(card)
    if not re.match(r"[tf]f?p?32", said) and re.search(r"bf16|fp16|amp|mixed|half|16", said):
        wanted = "bf16" if "bf16" in said else "fp16"
        for precision in (wanted, "fp16", "fp32"):
            with suppress(InputError):
                peaks.peak(precision)
                return {"precision": precision}
    return {"precision": "fp32", "tf32": "no tf32" not in said}


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
    row: dict[str, str], value: float, *, ranks: int, samples: int, tokens: int, profile: Profile
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


def _node(row: dict[str, str], card: str, per_node: int) -> NodeType:
    """Node type with the links and network of the source, or those of the usual node."""
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
    made = Node(
        card=card,
        devices=max(per_node, 1),
        link_bytes_per_second_by_ranks=kept,
        network_bytes_per_second=network,
    )
    return NodeType(card=load_card(card), node=made)


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
