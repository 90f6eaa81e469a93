"""Bytes that a strategy's definition needs the network to carry in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import fsum, prod


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Elements of all parameters together, and of what passes between parts of the model."""

    parameters: int
    trained_parameters: int
    """Those that have gradients."""
    trained_matrices: tuple[tuple[int, int, int], ...] = ()
    """Those as matrices: rows (the first dimension), columns, and how many there are of them."""
    divided: Mapping[str, int] = field(default_factory=dict)
    """Elements of a sample that pass into or out of layers which tensor ranks divide, by the side
    on which they meet: `in`, `out`, `rows` of embeddings, `logits`.  `exchanged`: around attention
    by ranks with parts of the sample.  `calls`: how often they meet in a pass."""
    divided_again: Mapping[str, int] = field(default_factory=dict)
    """Those that activation checkpointing passes again."""
    between_stages_bytes: int = 0
    """Bytes of a sample that pass from stage to stage of a pipeline, both ways together."""
    tied_parameters: int = 0
    """Elements of trained parameters that two stages hold."""
    units: int = 1
    """Parts whose parameters are gathered together."""
    costliest_stage: float = 1.0
    """What the rank of a pipeline computes that computes most, over the mean of its ranks."""
    largest_stage: float = 1.0
    """The same of the parameters that it holds."""

    @property
    def trained_tensors(self) -> int:
        return sum(count for *_, count in self.trained_matrices)


def matrices_of(shapes: Iterable[tuple[int, ...]]) -> tuple[tuple[int, int, int], ...]:
    """As `ModelSize.trained_matrices` has them."""
    counts = [(shape, prod(map(int, shape))) for shape in shapes]
    sizes = Counter((shape[0] if shape and count else 1, count) for shape, count in counts)
    return tuple((rows, elements // rows, count) for (rows, elements), count in sizes.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One kind of collective in a step, as one training rank sees it."""

    kind: str
    """As in the probe's `collectives`."""
    payload_bytes: float
    """Bytes of the tensors that the rank hands in: its own part for a gather."""
    ranks: int
    """In the group."""
    sent_by_peers: bool = False
    """Messages of other training ranks, which count where they are sent."""
    apart: int = 1
    """From one rank of the group to the next: 1 where they are neighbours."""
    waited_for: bool = False
    """Whether nothing is computed meanwhile.  Else gathers flow ahead of the layers that need them,
    and gradients while those of earlier layers are computed."""
    calls: float = 1.0
    """Of the library at least, one after the other; long ones are cut into more."""
    copied_bytes: float = 0.0
    """Read and written in the rank's own memory for it: casts, and copies into and out of messages,
    beside what the collective itself moves."""
    filling: bool = False
    """Between stages of a pipeline: hidden by other micro-batches, unless it fills or drains, or
    there is more of it than is computed."""
    crossing: float = 1.0
    """Share of it that goes to other nodes, where its group is on several."""
    every_steps: float = 1.0
    """It flows once in so many steps; its bytes are the mean step's."""

    @property
    def carried_bytes(self) -> float:
        """What the network has to carry for this rank."""
        if self.sent_by_peers:
            return 0.0
        share = carried_share(self.kind, self.ranks)
        assert share is not None, f"a strategy's formula names an unknown collective: {self.kind}"
        return share * self.payload_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WireBytes:
    """What the definition needs the network to carry in a step, for each training rank.

    These are a step's gradients and parameters alone: no loss, no norm, no evaluation.
    """

    traffic: tuple[Traffic, ...]
    formula: str
    """In words of n ranks, P bytes of parameters and G bytes of gradients."""
    note: str | None = None
    """How the library that it is built on differs from the definition."""

    @property
    def carried_bytes(self) -> float:
        return fsum(part.carried_bytes for part in self.traffic)


_SHARES: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
    "reduce": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "send": lambda _: 1.0,
    "receive": lambda _: 1.0,
    "barrier": lambda _: 0.0,
}


def carried_share(kind: str, ranks: int) -> float | None:
    """Bytes that must be carried for a rank, of each byte that it hands in; None if unknown.

    No algorithm undercuts them, and rings reach them; with one root, it is the mean over the ranks.
    A message counts where it is sent, and one from a parameter server for the worker that gets it.
    Source: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009), 117-124; Thakur and others,
    Int. J. High Performance Computing Applications 19 (2005), 49-66.
    """
    share = _SHARES.get(kind)
    return None if share is None else share(ranks)
