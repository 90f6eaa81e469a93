"""Reads cards and nodes: those that ship, and files of the user's in the same form."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from math import log
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from shardmark.config.messages import dotted, nearest
from shardmark.core.errors import InputError
from shardmark.core.peaks import peak_flops_per_second
from shardmark.core.recipe import Model
from shardmark.core.strict_yaml import parse_yaml

Kind = Literal["cards", "nodes"]
Read = TypeVar("Read", "Card", "Node")
MOST_DEVICES = 1024


class Timed(Model):
    """What one collective took between so many ranks, by the bytes of its whole payload."""

    ranks: Annotated[int, Field(ge=2)]
    seconds: Annotated[Mapping[PositiveInt, PositiveFloat], Field(min_length=2)]

    def of(self, payload_bytes: float) -> float:
        """Powers between two measured sizes; the least below all, in proportion above."""
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
    """One device as its data sheet has it: dense peaks, links one way."""

    device: str | None = None
    """Name as a driver reports it, whose peaks are in `core/peaks.py`."""
    peaks: Mapping[Literal["fp32", "tf32", "bf16", "fp16"], PositiveFloat] = Field(
        default_factory=dict
    )
    """FLOP/s by type; those of `device` where none are given."""
    memory_gib: PositiveFloat
    memory_bytes_per_second: PositiveFloat
    link_bytes_per_second: PositiveFloat | None = None
    """To the other cards of its node, all links together; None: only through the host."""
    host_bytes_per_second: PositiveFloat | None = None
    """To the host, and through it to cards without links."""
    link_latency_seconds: PositiveFloat | None = None
    """Of one message to another card of its node; None: as most cards' are."""
    link_seconds: Mapping[str, Timed] = Field(default_factory=dict)
    """Of collectives between the cards of a node, where they were measured."""
    operation_seconds: PositiveFloat | None = None
    """From the start of one operation to that of the next; None: as on most cards."""
    source: str

    @property
    def device_type(self) -> Literal["cpu", "cuda"]:
        return "cpu" if self.device == "cpu" else "cuda"

    def peak(self, precision: str, *, tf32: bool = False) -> float:
        """FLOP/s of products.  Raises `InputError` for a type that it has not in hardware."""
        if not self.peaks and self.device is not None:
            known, reason = peak_flops_per_second(self.device, precision, tf32=tf32)
        else:
            wanted = "tf32" if precision == "fp32" and tf32 else precision
            known = self.peaks.get(wanted) or (self.peaks.get("fp32") if tf32 else None)  # type: ignore[call-overload]
            reason = f"the card's file has no {precision}"
        if known is None:
            raise InputError("recipe.precision", reason, "use fp32 or fp16, or another card")
        return float(known)


class Node(Model):
    """Machines of one kind: cards, what joins them, and what joins the machines."""

    card: str
    """Name of one that ships, or a file."""
    devices: Annotated[int, Field(ge=1, le=MOST_DEVICES)]
    link_bytes_per_second_by_ranks: Mapping[PositiveInt, PositiveFloat] = Field(
        default_factory=dict
    )
    """What a ring of so many neighbours gets, one way, where fewer cards reach fewer links."""
    network_bytes_per_second: PositiveFloat | None = None
    """To other nodes, one way, all adapters together; None: never joined."""
    network_latency_seconds: PositiveFloat | None = None
    """Of one message to another node; None: as most networks' are."""
    network_seconds: Mapping[str, Timed] = Field(default_factory=dict)
    """Of collectives between all cards of several nodes, where they were measured."""
    host_memory_bytes_per_second: PositiveFloat | None = None
    """Of the node's own memory, in which offloaded state is updated; None: as most nodes' is."""
    shared_speed: Annotated[float, Field(gt=0, le=1)] = 1.0
    """What a rank keeps of its speed while all of the node compute: on CPUs they share cores."""
    source: str = "given"


class NodeType(Model):
    """A node with its card read."""

    card: Card
    node: Node

    def link_bytes_per_second(self, ranks: int) -> float:
        """One way between so many cards of a node.  Raises `InputError` where nothing is known."""
        by_ranks = self.node.link_bytes_per_second_by_ranks
        reached = [size for size in by_ranks if size >= ranks]
        own = self.card.link_bytes_per_second or self.card.host_bytes_per_second
        found = by_ranks[min(reached)] if reached else max(by_ranks.values(), default=own)
        if found is None:
            allowed = "give link_bytes_per_second or host_bytes_per_second in its file"
            raise InputError(f"card {self.node.card}", "nothing is known of its links", allowed)
        return found

    def slowdown(self, ranks: int) -> float:
        """How much longer computing takes where so many of the node compute at once."""
        others = max(1, self.node.devices - 1)
        return 1 + (1 / self.node.shared_speed - 1) * min(1.0, (ranks - 1) / others)

    @property
    def network_bytes_per_second(self) -> float:
        """To other nodes.  Raises `InputError` where nothing is known."""
        if self.node.network_bytes_per_second is None:
            allowed = "give network_bytes_per_second in a node's file, or use one node"
            raise InputError("--on", "nothing is known of the network between nodes", allowed)
        return self.node.network_bytes_per_second


def names(kind: Kind) -> tuple[str, ...]:
    """Of what ships."""
    folder = files("shardmark.predict.hardware") / kind
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir()))


@cache
def load_card(name: str) -> Card:
    """A card that ships, or a YAML file of one.  Raises `InputError` naming file and key."""
    return _checked(Card, _content("cards", name), name)


@cache
def load_node(name: str) -> NodeType:
    """A node that ships, a YAML file of one, or so many of a card: `h100x8`.

    A node's file may name a card's file beside it.  Raises `InputError` naming file and key.
    """
    counted = re.fullmatch(r"(.+)x(\d+)", name)
    if counted and name not in names("nodes") and not Path(name).is_file():
        content: Any = {"card": counted[1], "devices": int(counted[2])}
    else:
        content = _content("nodes", name)
        if isinstance(content, dict) and "memory_gib" in content:
            allowed = f"say how many: {name}x4, or name it in a node's file"
            raise InputError("--on", f"{name} is a card's file", allowed)
    node = _checked(Node, content, name)
    beside = Path(name).parent / node.card
    if Path(name).is_file() and not beside.is_file() and node.card not in names("cards"):
        allowed = f"allowed are {', '.join(names('cards'))} or a file beside it"
        raise InputError(name, f"card: there is no card {node.card!r}", allowed)
    return NodeType(card=load_card(str(beside) if beside.is_file() else node.card), node=node)


def joined_node(name: str, nodes: int) -> tuple[NodeType, list[str]]:
    """`load_node`; for several nodes of `h100x8` with the network of one that ships and has as many
    of that card, and a note about it."""
    found = load_node(name)
    if nodes == 1 or found.node.network_bytes_per_second is not None:
        return found, []
    for other in names("nodes"):
        of_other = load_node(other).node
        alike = (of_other.card, of_other.devices) == (found.node.card, found.node.devices)
        if alike and of_other.network_bytes_per_second is not None:
            network = {"network_bytes_per_second": of_other.network_bytes_per_second}
            node = found.node.model_copy(update=network)
            each = of_other.network_bytes_per_second / 1e9
            note = f"Between nodes: the network of {other}, {each:g} GB/s each way."
            return NodeType(card=found.card, node=node), [note]
    return found, []


def _content(kind: Kind, name: str) -> Any:
    if Path(name).is_file():
        return parse_yaml(Path(name).read_text(encoding="utf-8"), name)
    if name not in names(kind):
        known = names(kind)
        form = ", CARDxCOUNT" if kind == "nodes" else ""
        allowed = f"allowed are {', '.join(known)}{form} or a YAML file{nearest(name, known)}"
        if kind == "nodes" and name in names("cards"):
            raise InputError("--on", f"{name!r} is a card", f"say how many: {name}x8")
        if Path(name).suffix in {".yaml", ".yml"}:
            raise InputError("--on", f"there is no file {name!r}", "name one that is there")
        raise InputError("--on", f"there is no {kind.removesuffix('s')} {name!r}", allowed)
    shipped = files("shardmark.predict.hardware") / kind / f"{name}.yaml"
    return parse_yaml(shipped.read_text(encoding="utf-8"), name)


def _checked(model: type[Read], content: Any, where: str) -> Read:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        keys = ", ".join(model.model_fields)
        found = f"{dotted(first['loc']) or 'the file'}: {first['msg']}"
        raise InputError(where, found, f"its keys are {keys}") from None
