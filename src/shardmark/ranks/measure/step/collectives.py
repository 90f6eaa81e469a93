"""Counts the collectives that one rank calls, by kind, with the bytes of their inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardmark.base.results.schema import CollectiveRecord, Phase
from shardmark.ranks.measure.memory.tensors import local

KINDS: dict[str, tuple[str, int]] = {
    operator: (kind, position)
    for kind, position, operators in (
        ("all_reduce", 0, "allreduce_ allreduce_coalesced_ all_reduce"),
        ("all_gather", 1, "_allgather_base_ allgather_ allgather_into_tensor_coalesced_"),
        ("all_gather", 0, "all_gather_into_tensor"),
        ("reduce_scatter", 1, "_reduce_scatter_base_ reduce_scatter_"),
        ("reduce_scatter", 1, "reduce_scatter_tensor_coalesced_"),
        ("reduce_scatter", 0, "reduce_scatter_tensor"),
        ("broadcast", 0, "broadcast_"), ("reduce", 0, "reduce_"),
        ("gather", 1, "gather_"), ("scatter", 1, "scatter_"),
        ("all_to_all", 1, "alltoall_ alltoall_base_"),
        ("all_to_all", 0, "all_to_all_single shard_dim_alltoall"),
        ("send", 0, "send"), ("receive", 0, "recv_ recv_any_source_"), ("barrier", 0, "barrier"),
    )
    for operator in operators.split()
}  # fmt: skip
"""Kind of each operator, and the position of its input among its arguments."""
FUNCTIONAL = ("_c10d_functional", "_dtensor")
_PHASES: dict[str, Phase] = {"forward": "forward", "backward": "backward", "optimizer": "update"}
"""Span of a step -> its phase."""


class CollectiveCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Counts, while it is entered, the collectives of this thread and of its backward passes.

    DDP's reducer, FSDP2 and DeepSpeed all reach their backend through `c10d` operators, DTensor
    through functional ones.  The counter records the spans of a step to know the phase of a call.
    """

    def __init__(self, phase: Callable[[], Phase] | None = None) -> None:
        """`phase` returns the present phase of a step whose spans are not recorded here."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._spans: list[Phase] = []
        self._phase = phase or (lambda: self._spans[-1] if self._spans else "other")
        self._calls: dict[tuple[Phase, str], int] = defaultdict(int)
        """Number of calls by phase and kind."""
        self._bytes: dict[tuple[Phase, str], int] = defaultdict(int)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        self._spans.append(_PHASES.get(name, "other"))
        try:
            yield
        finally:
            self._spans.pop()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(tensor_type, DTensor) for tensor_type in types):
            return NotImplemented  # DTensor then calls collectives and operators on local tensors
        namespace, _, operator = str(func).partition(".")
        name = operator.rpartition(".")[0] or operator
        # Their namespace also has `wait_tensor`, which is no collective.
        if namespace == "c10d" or (namespace in FUNCTIONAL and name in KINDS):
            kind, position = KINDS.get(name, (name.strip("_"), 0))
            place = self._phase(), kind
            self._calls[place] += 1
            if len(args) > position:
                self._bytes[place] += sum(
                    tensor.numel() * tensor.element_size() for tensor in flat(args[position])
                )
        return func(*args, **(kwargs or {}))

    def probe_fields(self, steps: int = 1) -> dict[str, Any]:
        """Return the fields of a `ProbeRecord`, as means over so many steps."""
        totals: dict[str, CollectiveRecord] = {}
        by_phase: dict[Phase, dict[str, CollectiveRecord]] = {}
        for (phase, kind), count in self._calls.items():
            calls, payload_bytes = count / steps, self._bytes[phase, kind] / steps
            counted = CollectiveRecord(calls=calls, payload_bytes=payload_bytes)
            by_phase.setdefault(phase, {})[kind] = counted
            if kind in totals:
                calls += totals[kind].calls
                payload_bytes += totals[kind].payload_bytes
            totals[kind] = CollectiveRecord(calls=calls, payload_bytes=payload_bytes)
        return {"collectives": totals, "collectives_by_phase": by_phase}


def flat(value: object) -> Iterable[Tensor]:
    """Yield the local tensors in nested lists."""
    if isinstance(value, Tensor):
        yield local(value)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flat(item)
