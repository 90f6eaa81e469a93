"""Network traffic that a strategy requires in a step, and the model sizes it depends on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import fsum, prod
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

if TYPE_CHECKING:
    from torch import Tensor

FROZEN_ELEMENT_BYTES = 4.0
ELEMENT_BYTES = "element_bytes"
"""Attribute of a parameter that is stored in other bytes than those of its type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Numbers of elements of a model: its parameters, and activations that ranks exchange."""

    parameters: int
    trained_parameters: int
    """Number of parameters that have gradients."""
    trained_matrices: tuple[tuple[int, int, int], ...] = ()
    """Shapes of the trained parameters as matrices: rows (the first dimension), columns, count."""
    divided: Mapping[str, int] = field(default_factory=dict)
    """Activation elements of a sample that tensor-parallel layers communicate, by position: `in`,
    `out`, `rows` of embeddings, `logits`.  `exchanged`: elements that sequence-parallel ranks
    exchange around attention.  `calls`: number of collectives in a pass."""
    divided_again: Mapping[str, int] = field(default_factory=dict)
    """The part of `divided` that activation checkpointing communicates a second time."""
    between_stages_bytes: int = 0
    """Bytes of a sample that pipeline stages send each other, forward and backward."""
    tied_parameters: int = 0
    """Number of trained parameters that two pipeline stages share."""
    frozen_element_bytes: float = FROZEN_ELEMENT_BYTES
    """Mean bytes of an element of the frozen parameters, as they are stored."""
    mixed_parameters: int | None = None
    """Number of parameters in units with any trained parameter; None if all of them are trained."""
    units: int = 1
    """Number of units whose parameters are gathered together."""
    stage_compute_imbalance: float = 1.0
    """Work of the pipeline stage that computes most, divided by the mean of the stages."""
    stage_parameter_imbalance: float = 1.0
    """Parameters of the largest pipeline stage, divided by the mean of the stages."""

    @property
    def trained_tensors(self) -> int:
        return sum(count for *_, count in self.trained_matrices)


def matrix_shapes(shapes: Iterable[tuple[int, ...]]) -> tuple[tuple[int, int, int], ...]:
    """Return the shapes in the form of `ModelSize.trained_matrices`."""
    counts = [(shape, prod(map(int, shape))) for shape in shapes]
    sizes = Counter((shape[0] if shape and count else 1, count) for shape, count in counts)
    return tuple((rows, elements // rows, count) for (rows, elements), count in sizes.items())


def stored_element_bytes(parameter: Tensor) -> float:
    """Return the bytes of each element of a parameter as it is stored."""
    return float(getattr(parameter, ELEMENT_BYTES, parameter.element_size()))


def frozen_element_bytes(parameters: Iterable[Tensor]) -> float:
    """Return the mean bytes of an element of the frozen parameters, as they are stored."""
    sizes = [(p.numel(), stored_element_bytes(p)) for p in parameters if not p.requires_grad]
    elements = sum(count for count, _ in sizes)
    if not elements:
        return FROZEN_ELEMENT_BYTES
    return sum(count * element_bytes for count, element_bytes in sizes) / elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collectives of the same kind in a step of one training rank.  Part of stored results."""

    kind: str
    """Name of the collective, as in the probe's `collectives`."""
    payload_bytes: float
    """Bytes of the tensors that the rank passes to the collective: its own shard for a gather."""
    ranks: int
    """Number of ranks in the group."""
    sent_by_peers: bool = False
    """True if other training ranks send these messages, and therefore count them."""
    rank_stride: Annotated[int, Field(alias="apart")] = 1
    """Difference between the numbers of consecutive ranks of the group: 1 for neighbours.

    Results store it under the key `apart`.
    """
    waited_for: bool = False
    """True if the rank computes nothing during the collective.  Otherwise gathers run ahead of the
    layers that need them, and gradients are reduced while earlier layers compute theirs."""
    calls: float = 1.0
    """Number of consecutive calls of the library; less than 1 if one call serves several steps."""
    copied_bytes: float = 0.0
    """Bytes that the rank reads and writes in its own memory for casts and for copies into and out
    of message buffers."""
    filling: bool = False
    """True for sends between pipeline stages: other micro-batches hide them, except while
    the pipeline fills or drains, or if they take longer than the computation."""
    crossing: float = 1.0
    """Fraction of the traffic that goes to other nodes, if the group spans several."""
    every_steps: float = 1.0
    """Number of steps between two such collectives; the bytes are the mean of a step."""

    @property
    def required_bytes(self) -> float:
        """Bytes that the network must transfer for this rank."""
        if self.sent_by_peers:
            return 0.0
        fraction = required_fraction(self.kind, self.ranks)
        assert fraction is not None, f"unknown collective in a strategy's formula: {self.kind}"
        return fraction * self.payload_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredTraffic:
    """Traffic that a strategy's definition requires of each training rank in a step.

    It counts gradients, parameters and activations of a step, not losses, norms or evaluations.
    """

    traffic: tuple[Traffic, ...]
    formula: str
    """Formula for n ranks, P bytes of parameters and G bytes of gradients."""
    note: str | None = None
    """Difference between the library's traffic and the definition's, if any."""

    @property
    def required_bytes(self) -> float:
        return fsum(traffic.required_bytes for traffic in self.traffic)


_REQUIRED_FRACTIONS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    **dict.fromkeys(
        ("reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter"),
        lambda n: (n - 1) / n,
    ),
    **dict.fromkeys(("send", "receive"), lambda _: 1.0),
    "barrier": lambda _: 0.0,
}


def required_fraction(kind: str, ranks: int) -> float | None:
    """Return the bytes that the network must transfer for each byte that a rank passes in.

    None for an unknown collective.  These are lower bounds, which ring algorithms reach; for a
    collective with a root, the mean over the ranks.  A message counts for its sender, except that a
    parameter server's message counts for the worker that receives it.
    Source: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009), 117-124; Thakur and others,
    Int. J. High Performance Computing Applications 19 (2005), 49-66.
    """
    fraction = _REQUIRED_FRACTIONS.get(kind)
    return None if fraction is None else fraction(ranks)
