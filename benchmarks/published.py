"""Published figures of training speed as cases: what was run, where, and the time of its step."""

from __future__ import annotations

import csv
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.architectures import profile_of

from shardmark.core.errors import InputError
from shardmark.core.recipe import Optimizer, Recipe
from shardmark.predict.hardware.catalogue import Node, NodeType, load_card, load_node
from shardmark.predict.profile import Profile
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
"""Whose links and networks stand in where a source names none."""
SECONDS = {"ms": 1e-3, "s": 1, "min": 60, "h": 3600}
USUAL_SEQUENCE = 512
USUAL_DEVICES = 8
ETHERNET_BYTES_PER_SECOND = 10e9 / 8
"""Where a source says no more than Ethernet."""
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
INFINIBAND_RATES = {"fdr": "56 Gb/s", "edr": "100 Gb/s", "hdr": "200 Gb/s", "ndr": "400 Gb/s"}
INFINIBAND = re.compile(r"(?<!Gb/s )\b(fdr|edr|hdr|ndr)\b", re.IGNORECASE)
LOADER = re.compile(r"(?<!\S)(\S+) sections are data-loader bound.*section: [^;]*\1\b")


class UnusableError(ValueError):
    """The row does not say enough, or says what is not predicted."""


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
    """Of a step, as published."""
    assumed_batch: bool

    @property
    def micro_batch(self) -> int:
        assert self.recipe.per_rank_batch is not None
        return self.recipe.per_rank_batch // self.recipe.gradient_accumulation

    @property
    def samples_per_second(self) -> float:
        """Of a rank, as published."""
        assert self.recipe.per_rank_batch is not None
        return self.recipe.per_rank_batch / self.seconds


def read(path: Path) -> tuple[list[Case], list[tuple[str, str]]]:
    """The cases of a file, and the rows that are none, with the reason."""
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
    """Raises `ValueError` saying what is missing."""
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
    """Tokens of a sample; where none are counted, their number matters little."""
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
    """fp32 on Ampere and later usually multiplies in TF32."""
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
    """Samples of a pass, passes of a step, and whether the source leaves them open."""
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
    """From times of steps or epochs, from rates of all ranks or of each, and from FLOP/s."""
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
    """Links and network as the source says, else those of such cards' usual node."""
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
        each.flops.of(samples) for unit in profile.units for each in (*unit.forward, *unit.backward)
    )
