"""Published figures of training speed as cases: the training, the machine, and its step time.

Profiles of well-known models come from formulas, since published models cannot be traced.
Multiplications and activations of vision models are those of their papers and of timm's tables;
stages are shares of parameters and of work, first layers first.
"""

from __future__ import annotations

import csv
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardmark.core.errors import InputError
from shardmark.core.recipe import Optimizer, Recipe
from shardmark.core.traffic import ModelSize
from shardmark.predict.hardware.catalogue import Node, NodeType, load_card, load_node
from shardmark.predict.profile import Amount, Operation, Profile, Unit
from shardmark.strategies import build_strategy
from shardmark.strategies.base import Strategy

COLUMNS = (
    *("id", "source", "model", "params_b", "task", "seq_len_or_image", "micro_batch"),
    *("global_batch", "precision", "strategy", "activation_checkpointing", "gpu", "n_gpus"),
    *("gpus_per_node", "interconnect", "throughput_value", "throughput_unit", "notes"),
)
CARDS = (
    (r"a100.*80", "a100-80"), (r"a100", "a100-40"), (r"v100.*pcie", "v100-pcie"),
    (r"v100.*32", "v100-32"), (r"v100", "v100-16"), (r"h100.*pcie", "h100-pcie"),
    (r"h100|h800", "h100"), (r"h200", "h200"), (r"b200", "b200"), (r"a10g", "a10g"),
    (r"a6000", "rtx-a6000"), (r"a5000", "rtx-a5000"), (r"a30\b", "a30"), (r"a40\b", "a40"),
    (r"a10\b", "a10"), (r"l40s", "l40s"), (r"l40\b", "l40"), (r"\bl4\b", "l4"),
    (r"6000 ada", "rtx-6000-ada"), (r"5090", "rtx-5090"), (r"4090", "rtx-4090"),
    (r"4070 ti", "rtx-4070-ti"), (r"3090", "rtx-3090"), (r"3080", "rtx-3080"),
    (r"2080 ti", "rtx-2080-ti"), (r"1080 ti", "gtx-1080-ti"), (r"titan rtx", "titan-rtx"),
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


PICTURES = (
    Pictures(r"mask.?r-?cnn|keypoint", 44.4, 134, 330),
    Pictures(r"faster.?r-?cnn|retinanet|cascade", 41.8, 134, 330),
    Pictures(r"ssd300", 22.9, 13, 40), Pictures(r"resnext-?101.*32x8d", 88.8, 16.5, 31.2, RESNET),
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
    Pictures(r"googlenet|inception-?v?1", 6.6, 1.5, 3.2), Pictures(r"densenet-?121", 8.0, 2.9, 6.9),
    Pictures(r"efficientnet-?_?b0", 5.3, 0.4, 6.7), Pictures(r"efficientnet-?_?b4", 19.3, 4.5, 50),
    Pictures(r"mobilenet_?v2", 3.5, 0.3, 6.7), Pictures(r"mobilenet_?v3", 5.5, 0.2, 4.4),
    Pictures(r"convnext.?large", 197.8, 34.4, 43.1), Pictures(r"convnext.?base", 88.6, 15.4, 28.8),
    Pictures(r"convnext.?tiny", 28.6, 4.5, 13.4), Pictures(r"regnet_?y.?128gf", 644.8, 127.7, 71.6),
    Pictures(r"swin.?b", 87.8, 15.5, 36.6), Pictures(r"swin.?t", 28.3, 4.5, 17.1),
    Pictures(r"vit.?(tiny|ti).*16", 5.7, 1.3, 6.0),
    Pictures(r"(vit|deit).?(small|s).*16", 22.1, 4.6, 11.9),
    Pictures(r"(vit|deit).?(base|b).*16", 86.6, 17.6, 23.9),
    Pictures(r"vit.?(base|b).*32", 88.2, 4.4, 5.0),
    Pictures(r"vit.?(large|l).*16", 304.3, 61.6, 63.5),
)  # fmt: skip
TEXT = (
    Text(r"mpt-?125m", 12, 768), Text(r"mpt-?350m", 24, 1024), Text(r"mpt-?760m", 24, 1536),
    Text(r"mpt-?1b", 24, 2048), Text(r"mpt-?3b", 32, 2560), Text(r"mpt-?7b", 32, 4096),
    Text(r"mpt-?13b", 40, 5120), Text(r"mpt-?30b", 48, 7168), Text(r"mpt-?70b", 80, 8192),
    Text(r"bert.?large|megatron bert", 24, 1024, 336, 512), Text(r"bert.?base", 12, 768, 110, 512),
    Text(r"transformer-?xl.*large", 18, 1024, 257, 384),
    Text(r"transformer-?xl", 16, 512, 192, 192), Text(r"transformer.*big", 12, 1024, 213, 32),
    Text(r"gpt-?2.?xl", 48, 1600, 1558, 1024), Text(r"gpt-?2.?large", 36, 1280, 774, 1024),
    Text(r"gpt-?2.?medium", 24, 1024, 355, 1024), Text(r"gpt-?2|nanogpt", 12, 768, 124, 1024),
    Text(r"tinyllama", 22, 2048, 1100, 2048), Text(r"llama.*70b", 80, 8192, 70600),
    Text(r"llama.*13b", 40, 5120, 13016), Text(r"llama.*[78]b", 32, 4096, 6738),
)  # fmt: skip
ASPECT = 100
"""Width over layers of a transformer of which only the size is known."""


def profile_of(
    model: str,
    million_parameters: float | None,
    sequence: int | None,
    width_bytes: int,
    *,
    pictures: bool,
) -> tuple[Profile, int]:
    """The model's profile, and the tokens of a sample (1 for pictures).

    `width_bytes` is the size of an activation; `pictures` is true if an unknown model is a vision
    model.  Raises `ValueError` if its size or the length of its sequences is not known.
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
    """A transformer: 2 FLOPs per parameter and token, 4 s d of attention, 17 stored activations.

    The head is the embedding, whose gradient is complete only after the backward pass.

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
    """A profile from parameters, FLOPs and activation bytes of each unit's forward pass."""

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


class UnusableError(ValueError):
    """The row states too little, or a training that is not predicted."""


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
    assumed_batch: bool

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
        raise UnusableError("no speed is stated")
    if LOADER.search(row["notes"]):
        raise UnusableError("its source says that its data loader bounds it")
    ranks = int(_number(row["n_gpus"]) or 0)
    if not ranks:
        raise UnusableError("the number of GPUs is not stated")
    said = f"{row['strategy']} {row['task']} {row['model']}".lower()
    for pattern, reason in REFUSED:
        if re.search(pattern, said):
            raise UnusableError(reason)
    card = _first(CARDS, row["gpu"].lower(), "the card is not stated, or not one of ours")
    precision = _precision(row["precision"].lower(), card)
    params = _number(row["params_b"])
    profile, tokens = profile_of(
        row["model"],
        params and 1e3 * params,
        _sequence(row),
        4 if precision["precision"] == "fp32" else 2,
        pictures=bool(re.search(r"classification \(|imagenet|cifar|detect|segment|image", said)),
    )
    micro, passes, assumed = _batch(row, ranks, tokens)
    offloads = "offload" in said
    recipe = Recipe(
        steps=1,
        cpu_offload=offloads,
        per_rank_batch=micro * passes,
        gradient_accumulation=passes,
        activation_checkpointing=row["activation_checkpointing"].lower().startswith("full"),
        optimizer=Optimizer(name="adamw" if tokens > 1 else "sgd"),
        **precision,
    )
    per_node = int(_number(row["gpus_per_node"]) or min(ranks, USUAL_DEVICES))
    nodes = -(-ranks // per_node)
    if nodes * per_node != ranks and nodes > 1:
        raise UnusableError("its nodes do not have equally many ranks")
    name = "single" if ranks == 1 and not offloads else _strategy(row["strategy"].lower())
    if offloads and not name.startswith(("fsdp", "zero-")):
        raise UnusableError(f"it offloads, which {name} does not")
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
        assumed_batch=assumed,
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
    raise UnusableError("its strategy is not one of ours")


def _precision(said: str, card: str) -> dict[str, Any]:
    """Precision keys of the recipe; fp32 on Ampere and later usually multiplies in TF32."""
    if "fp8" in said:
        raise UnusableError("fp8 is not predicted")
    peaks = load_card(card)
    if re.search(r"bf16|fp16|amp|mixed|half|16", said):
        wanted = "bf16" if "bf16" in said else "fp16"
        for precision in (wanted, "fp16", "fp32"):
            with suppress(InputError):
                peaks.peak(precision)
                return {"precision": precision}
    return {"precision": "fp32", "tf32": True}


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
            raise UnusableError("the samples of an epoch are not stated")
        return seconds * samples * ranks / float(epoch[1].replace(",", ""))
    if re.match(r"(it|iter\w*|steps?)/s", unit):
        return 1 / value
    each = value if re.search(r"(/|per )(gpu|device|accelerator|chip)", unit) else value / ranks
    rate = re.match(r"(img|image|seq|sample|example|sentence|token)\w*/s", unit)
    if rate:
        return samples * (tokens if rate[1] == "token" else 1) / each
    if unit.startswith("tflop"):
        return _flops(profile, samples) / (each * 1e12)
    raise UnusableError(f"its speed is in {row['throughput_unit'] or 'no unit'}")


def _node(row: dict[str, str], card: str, per_node: int) -> NodeType:
    """Node type with the links and network of the source, or those of the usual node."""
    said = row["interconnect"]
    usual = next((name for pattern, name in NODES if re.search(pattern, row["gpu"].lower())), None)
    node = load_node(usual) if usual else load_node(f"{card}x{per_node}")
    network = node.node.network_bytes_per_second or 100e9 / 8
    told = INFINIBAND.sub(lambda found: INFINIBAND_RATES[found[0].lower()], said)
    stated = re.search(r"(?:(\d+)\s*x\s*)?([\d.]+)\s*([GT])b(?!y)", told)
    if stated:
        network = int(stated[1] or 1) * float(stated[2]) * {"G": 1e9, "T": 1e12}[stated[3]] / 8
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
    raise UnusableError(otherwise)


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
