"""Reads the cards and nodes that ship, and files of the user in the same form."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from math import log
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from shardmark.base.errors import InputError, ShardmarkError
from shardmark.base.files.strict_yaml import parse_yaml
from shardmark.base.peaks import peak_flops_per_second
from shardmark.base.recipe import Model
from shardmark.experiment.messages import dotted, nearest

Kind = Literal["cards", "nodes"]
Read = TypeVar("Read", "Card", "Node")
MOST_DEVICES = 1024
GiB = 2**30
_TIMES = r"\s*(?:[x\u00d7*:]|nodes?\s+(?:of|with|x)?)\s*"
_COUNTED = (
    re.compile(rf"(?:gpu_)?(?P<count>\d{{1,4}})(?:{_TIMES}|[\s-]+|(?=[a-z]\w))(?P<name>.+)", re.I),
    re.compile(rf"(?P<name>.+?)(?<![rgdh][tg]){_TIMES}(?P<count>\d{{1,4}})", re.I),
)
"""A number of cards or nodes: `8xh100`, `8 H100`, `8h100`, `h100x8`, `H100:8`, `2 nodes of 8 H100`;
the x of `rtx4090` and `dgx1` belongs to the name."""
_IGNORED = (
    r"nvidia|amd|geforce|quadro|tesla|instinct|radeon|blackwell|\b(?:gpu|card)s?\b|generation"
    r"|(?:workstation|server)?[ -]?edition|sxm\d?|hbm\d?e?|oam|nvlink|\bmega\b"
    r"|(?<=\d)[ -]?gi?bs?\b|(?<=[ -]\d\d)g\b|(?<=\ds)s\b"
)
"""The maker, the socket, the kind of memory and its unit in the name of a card."""
_OTHERS = re.compile(
    r"tpu|v\d(?:e|p|litepod)\b|\bm\d\b|\bmac\b|trn\d|inf\d|gaudi|ascend|\barc\b|cpu"
)
"""Devices of other makers, and CPUs, in lower case."""
_WORD = re.compile(r"rtx|gtx|rx|pro|pcie|super|ti(?=s?\b)|x(?=s\b)|[a-z]*\d+|[a-z]+")
"""A word of a card's name, also where no space separates it: `rtx4070tis` has four."""
NEW_CARD = "rtx-a2000"
"""A card whose file shows how to add one."""


class Timed(Model):
    """Measured times of a collective between so many ranks, by the bytes of its full payload."""

    ranks: Annotated[int, Field(ge=2)]
    seconds: Annotated[Mapping[PositiveInt, PositiveFloat], Field(min_length=2)]

    def seconds_of(self, payload_bytes: float) -> float:
        """Interpolate: a power law between two sizes, constant below all, proportional above."""
        sizes = sorted(self.seconds)
        if payload_bytes >= sizes[-1]:
            return self.seconds[sizes[-1]] * payload_bytes / sizes[-1]
        if payload_bytes <= sizes[0]:
            return self.seconds[sizes[0]]
        at = bisect_right(sizes, payload_bytes)
        low, high = sizes[at - 1], sizes[at]
        share = log(payload_bytes / low) / log(high / low)
        return float(self.seconds[low] ** (1 - share) * self.seconds[high] ** share)


class Card(Model):
    """Data sheet of a device: dense peaks, and links in one direction."""

    device: str | None = None
    """Name that the driver reports; its peaks are in `base/peaks.yaml`."""
    peaks: Mapping[Literal["fp32", "tf32", "bf16", "fp16", "fp8"], PositiveFloat] = Field(
        default_factory=dict
    )
    """FLOP/s by type; by default those of `device`."""
    memory_gib: PositiveFloat
    memory_bytes_per_second: PositiveFloat
    ecc: bool = False
    """True for GDDR memory that corrects errors as delivered.  Its data sheet has the figures
    without that: a sixteenth of the memory, and a fifth of the bandwidth, go into check bits.
    Source: NVIDIA, CUDA C++ Best Practices Guide."""
    link_bytes_per_second: PositiveFloat | None = None
    """Bandwidth of all links to other cards of the node; None if they connect through the host."""
    host_bytes_per_second: PositiveFloat | None = None
    """Bandwidth to the host, and through it to cards without links."""
    peer_access: bool = True
    """False for a card that cannot write to the memory of another one without links: messages go
    through buffers in the host's memory."""
    link_latency_seconds: PositiveFloat | None = None
    """Latency of a message to another card of the node; None for the usual one."""
    link_seconds: Mapping[str, Timed] = Field(default_factory=dict)
    """Measured times of collectives between the cards of a node, by name."""
    operation_seconds: PositiveFloat | None = None
    """Time between the starts of two operations; None for the usual one."""
    source: str

    @property
    def usable_bytes(self) -> float:
        """Memory that the driver reports."""
        return self.memory_gib * GiB * (15 / 16 if self.ecc else 1)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the memory beside check bits."""
        return self.memory_bytes_per_second * (0.8 if self.ecc else 1)

    @property
    def device_type(self) -> Literal["cpu", "cuda"]:
        return "cpu" if self.device == "cpu" else "cuda"

    def peak(self, precision: str, *, tf32: bool = False) -> float:
        """FLOP/s of products.  Raises `InputError` for a type that is not in hardware."""
        if not self.peaks and self.device is not None:
            peak, reason = peak_flops_per_second(self.device, precision, tf32=tf32)
        else:
            wanted = "tf32" if precision == "fp32" and tf32 else precision
            peak = self.peaks.get(wanted) or (self.peaks.get("fp32") if tf32 else None)  # type: ignore[call-overload]
            reason = f"the card's file has no {precision}"
        if peak is None:
            others = "bf16" if precision == "fp8" else "fp32 or fp16"
            raise InputError("recipe.precision", reason, f"use {others}, or another card")
        return float(peak)


class Node(Model):
    """A kind of machine: its cards, and the links between cards and between machines."""

    card: str
    """Name of a card that ships, or of a file."""
    devices: Annotated[int, Field(ge=1, le=MOST_DEVICES)]
    link_bytes_per_second_by_ranks: Mapping[PositiveInt, PositiveFloat] = Field(
        default_factory=dict
    )
    """Bandwidth of a ring by its number of ranks, if fewer cards use fewer links."""
    network_bytes_per_second: PositiveFloat | None = None
    """Bandwidth of all adapters to other nodes, one way; None for a single machine."""
    network_latency_seconds: PositiveFloat | None = None
    """Latency of a message to another node; None for the usual one."""
    network_seconds: Mapping[str, Timed] = Field(default_factory=dict)
    """Measured times of collectives between all cards of several nodes, by name."""
    host_memory_gib: PositiveFloat | None = None
    """Memory of the host; None if it is not known."""
    host_memory_bytes_per_second: PositiveFloat | None = None
    """Bandwidth of the host's memory, where offloaded state is updated; None for the usual one."""
    shared_speed: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of its speed that a rank has while all ranks compute: on CPUs they share cores."""
    source: str = "given"


class NodeType(Model):
    """A node and its card."""

    card: Card
    node: Node

    def link_bytes_per_second(self, ranks: int) -> float:
        """Bandwidth between so many cards of a node, one way.  Raises `InputError` if unknown."""
        by_ranks = self.node.link_bytes_per_second_by_ranks
        larger = [size for size in by_ranks if size >= ranks]
        of_card = self.card.link_bytes_per_second or self.card.host_bytes_per_second
        bandwidth = by_ranks[min(larger)] if larger else max(by_ranks.values(), default=of_card)
        if bandwidth is None:
            allowed = "give link_bytes_per_second or host_bytes_per_second in its file"
            raise InputError(f"card {self.node.card}", "its links are not described", allowed)
        return bandwidth

    @property
    def staged(self) -> bool:
        """True if messages between cards of a node go through the host's memory."""
        linked = self.card.link_bytes_per_second or self.node.link_bytes_per_second_by_ranks
        return not linked and not self.card.peer_access

    def slowdown(self, ranks: int) -> float:
        """Factor by which computing takes longer if so many ranks of the node compute at once."""
        others = max(1, self.node.devices - 1)
        return 1 + (1 / self.node.shared_speed - 1) * min(1.0, (ranks - 1) / others)

    @property
    def network_bytes_per_second(self) -> float:
        """Bandwidth to other nodes.  Raises `InputError` if it is not known."""
        if self.node.network_bytes_per_second is None:
            allowed = "give network_bytes_per_second in a node's file, or use one node"
            raise InputError("--on", "the network between nodes is not described", allowed)
        return self.node.network_bytes_per_second


def names(kind: Kind) -> tuple[str, ...]:
    """Names of the cards or nodes that ship."""
    folder = files("shardmark.predict.hardware") / kind
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir()))


@cache
def load_card(name: str) -> Card:
    """Load a card that ships, or a YAML file.  Raises `InputError` with file and key."""
    return _checked(Card, _content("cards", name), name)


def nodes_of(machines: str) -> tuple[str, int | None]:
    """Split `2x8xh100` or `2xdgx-h100` into the name of a node and the number of nodes.

    The number is None for a node alone, such as `8xh100`.  More cards than the nodes that ship with
    them have are several of those: `32xh100` is 4 nodes.
    """
    machines = re.sub(r"^(?:aws|azure|gcp|lambda|runpod)\s", "", machines.strip(), flags=re.I)
    if _is_node(machines):
        return machines, None
    counted = _cards_of(machines)
    if counted and (card := card_name(counted[1])) in names("cards"):
        sizes = [node.node.devices for node in _nodes_with(card).values()]
        nodes, rest = divmod(counted[0], max(sizes, default=MOST_DEVICES))
        is_several = nodes > 1 and rest == 0 and counted[0] <= MOST_DEVICES
        return (f"{max(sizes)}x{card}", nodes) if is_several else (machines, None)
    for count, node in _readings(machines):
        if _is_node(node) or _cards_of(node):
            return node, count
    return machines, None


@cache
def load_node(name: str) -> NodeType:
    """Load a node that ships, a YAML file, or a number of cards: `8xh100` or `h100x8`.

    A node's file may name a card's file beside it.  Raises `InputError` naming file and key.
    """
    name = _instances().get(_plain_node(name), name)
    if counted := _cards_of(name):
        devices, card = counted
        if not 1 <= devices <= MOST_DEVICES:
            allowed = f"the number of cards of a node is from 1 to {MOST_DEVICES}"
            raise InputError("--on", f"found {name}", allowed)
        content: Any = {"card": card_name(card), "devices": devices}
    else:
        content = _content("nodes", name)
        if isinstance(content, dict) and "memory_gib" in content:
            allowed = f"say how many: 4x{name}, or name it in a node's file"
            raise InputError("--on", f"{name} is a card's file", allowed)
    node = _checked(Node, content, name)
    beside = Path(name).parent / node.card
    if Path(name).is_file() and not beside.is_file() and node.card not in names("cards"):
        allowed = f"allowed are {', '.join(names('cards'))} or a file beside it"
        raise InputError(name, f"card: there is no card {node.card!r}", allowed)
    return NodeType(card=load_card(str(beside) if beside.is_file() else node.card), node=node)


def joined_node(name: str, nodes: int) -> tuple[NodeType, list[str]]:
    """Load a node for a number of nodes, and return notes about it.

    Several nodes such as `h100x8` get the network of a node that ships with that card: of one with
    as many of them, or else for each card, and of the maker's own before those of clouds.
    """
    loaded = load_node(name)
    if nodes == 1 or loaded.node.network_bytes_per_second is not None:
        return loaded, []
    card, devices = loaded.node.card, loaded.node.devices
    others = _nodes_with(card)
    if not others:
        return loaded, []
    chosen = min(others, key=lambda one: (others[one].node.devices != devices, "dgx" not in one))
    share = devices / others[chosen].node.devices
    bandwidth = others[chosen].network_bytes_per_second * share
    node = loaded.node.model_copy(update={"network_bytes_per_second": bandwidth})
    part = "" if share == 1 else f" for {devices} of its {others[chosen].node.devices} cards"
    note = f"Between nodes: the network of {chosen}, {bandwidth / 1e9:g} GB/s each way{part}."
    return NodeType(card=loaded.card, node=node), [note]


@cache
def card_name(name: str) -> str:
    """Return the name of the card that ships for a spelling such as `H100s`, `A100-80GB` or `4090`.

    Other names are returned as they are.
    """
    if _is_file(name):
        return name
    words = _words(name)
    longer = ["super" if word == "s" else word for word in words]
    matching = _cards_named(words)
    if not (matching or _cards_with(words) or _cards_with(longer)):  # as V100S is no plural
        matching = _cards_named([word for word in words if word != "s"])
    return matching[0] if len(matching) == 1 else name


def _words(name: str) -> list[str]:
    """Return the words of a card's name without the maker, the socket and the unit of memory."""
    return _WORD.findall(re.sub(_IGNORED, " ", re.sub(r"[_()]", " ", name.lower())))


def _cards_named(words: list[str]) -> list[str]:
    """Return the cards whose names have these words in any order, or else another spelling."""
    cards, wanted = names("cards"), sorted(words)
    exact = [card for card in cards if sorted(_words(card)) == wanted]
    return exact or [card for card in cards if wanted in _spellings(card)]


@cache
def _spellings(name: str) -> list[list[str]]:
    """Return the words of a card without its brand, with its memory, and as its driver has them."""
    card, words = load_card(name), _words(name)
    bare = words[1:] if words[0] in {"rtx", "gtx", "rx"} else words
    with_memory = [[*one, f"{card.memory_gib:g}"] for one in (words, bare)]
    without_x = words[:-1] if words[-1] == "x" else words
    return [sorted(one) for one in (bare, *with_memory, without_x, _words(card.device or name))]


def _cards_with(words: list[str]) -> list[str]:
    """Return the cards whose names have these words among others."""
    return [card for card in names("cards") if words and not Counter(words) - Counter(_words(card))]


@cache
def node_name(name: str) -> str:
    """Return the name of the node that ships for a spelling such as `DGX-H100` or `a3-mega`.

    Other names are returned as they are.
    """
    plain = _plain_node(name)
    exact = [other for other in names("nodes") if _plain_node(other) == plain]
    family = [other for other in names("nodes") if _plain_node(other.partition(".")[0]) == plain]
    return (exact or family)[0] if len(exact or family) == 1 else name


def _plain_node(name: str) -> str:
    """Return letters and digits alone, without what the names of a cloud repeat."""
    repeated = r"^ml\.|nvidia|standard|gpu(-8g)?|(?<=nd)\d+[ai]|sr(?=_)|(?<=0)gb$"
    return re.sub(f"{repeated}|[^a-z0-9.]", "", name.lower())


@cache
def _instances() -> Mapping[str, str]:
    """Return the cards of a cloud's machine, such as `4xa10g`, by its plain name."""
    content = files("shardmark.predict.hardware").joinpath("instances.yaml").read_text("utf-8")
    groups = parse_yaml(content, "instances.yaml")
    return {_plain_node(name): cards for group in groups for name, cards in group["cards"].items()}


def _nodes_with(card: str) -> Mapping[str, NodeType]:
    """Return the nodes that ship with a card."""
    nodes = {name: load_node(name) for name in names("nodes")}
    return {name: node for name, node in nodes.items() if node.node.card == card}


def _is_node(name: str) -> bool:
    """Return whether the name is that of a file, of a node that ships, or of a cloud's machine."""
    return _is_file(name) or node_name(name) in names("nodes") or _plain_node(name) in _instances()


def _readings(name: str) -> list[tuple[int, str]]:
    matches = filter(None, (pattern.fullmatch(name) for pattern in _COUNTED))
    return [(int(match["count"]), match["name"]) for match in matches]


def _cards_of(name: str) -> tuple[int, str] | None:
    """Return the number and the card of `8xh100` or `h100x8`, or None for another name.

    In the name of a card, such as `7900xtx`, and after a number that no node has, an x is a letter.
    """
    cards = names("cards")
    if card_name(name) in cards or _is_node(name):
        return None
    readings = _readings(name)
    of_cards = [one for one in readings if _is_file(one[1]) or card_name(one[1]) in cards]
    if of_cards and re.search(r"\bnodes?\b", name, re.IGNORECASE):
        raise InputError("--on", f"found {name!r}", "say the cards of a node, as 2x8xh100")
    return next(iter((*of_cards, *(one for one in readings if one[0] <= MOST_DEVICES))), None)


def _is_file(name: str) -> bool:
    return Path(name).is_file()


def _content(kind: Kind, name: str) -> Any:
    if _is_file(name):
        return parse_yaml(Path(name).read_text(encoding="utf-8"), name)
    if kind == "nodes":
        name = node_name(name)
    if name not in names(kind):
        shipped_names = names(kind)
        cards = (card_name(name), card_name(name.removesuffix("x")))
        card = next((one for one in cards if one in names("cards")), None)
        if kind == "nodes" and card is not None:
            raise InputError("--on", f"{card!r} is a card", f"say how many: 1x{card} or 8x{card}")
        if Path(name).suffix in {".yaml", ".yml"}:
            raise InputError("--on", f"there is no file {name!r}", "name one that is there")
        problem = f"there is no {kind.removesuffix('s')} {name!r}"
        like = _cards_with([word for word in _words(name) if word != "s"])
        if (plain := _plain_node(name)) and (kind == "nodes" or plain.startswith("dgx")):
            like += [node for node in names("nodes") if _plain_node(node).startswith(plain)]
        if len(like) > 1:
            raise InputError("--on", problem, f"say which: {' or '.join(like)}")
        if _OTHERS.search(name.lower()):
            measured = "measure this machine by `shardmark doctor --network --write FILE`"
            allowed = f"name one, such as 1xh100, or {measured}, and name the file"
            raise InputError("--on", f"{name!r} is no GPU of NVIDIA or AMD", allowed)
        form = "COUNTxCARD such as 8xh100, " if kind == "nodes" else ""
        file = f"{re.sub(r'[^a-z0-9.-]+', '-', name.lower())}.yaml"
        allowed = (
            f"allowed are {form}{', '.join(shipped_names)}{nearest(name, shipped_names)}, or a card"
            f" of your own, 8x{file}, a file of five lines as that of {NEW_CARD}"
        )
        lines = _shipped("cards", NEW_CARD).splitlines()
        raise InputError("--on", problem, allowed, *map(ShardmarkError, lines))
    return parse_yaml(_shipped(kind, name), name)


def _shipped(kind: Kind, name: str) -> str:
    file = files("shardmark.predict.hardware") / kind / f"{name}.yaml"
    return file.read_text(encoding="utf-8")


def _checked(model: type[Read], content: Any, source: str) -> Read:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        keys = ", ".join(model.model_fields)
        message = f"{dotted(first['loc']) or 'the file'}: {first['msg']}"
        raise InputError(source, message, f"its keys are {keys}") from None
