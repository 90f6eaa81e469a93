"""Errors of models whose calls do not suit sharded parameters, explained with a remedy."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardmark.core.errors import StrategyUnavailable
from shardmark.strategies.parameters import listed

if TYPE_CHECKING:
    from torch import nn

NOT_GATHERED = re.compile(r"storage of size 0")
"""Words of torch's error about a parameter that is used while it is sharded."""
FLAT = re.compile(r"mat2 must be a matrix, got 1-D tensor")
"""Words of the same error in a backward pass.

In a forward pass, the user's own tensors may be the reason.
"""
BACKWARD = "_engine_run_backward"
"""Name of torch's function that runs every backward pass."""
COMPILERS = ("torch._dynamo.", "torch._inductor.")
END = "the end of the model"


@contextmanager
def equal_calls(
    strategy: str,
    root: nn.Module,
    units: Mapping[str, nn.Module],
    gather: Callable[[object], list[object]],
) -> Iterator[None]:
    """Raise `StrategyUnavailable` if ranks call different units.  Collective.

    Ranks exchange the name of a unit before its first call, and at the end of the root: the
    collectives of the library would end the process or wait forever.
    """
    called: list[str] = []

    def compare(name: str) -> None:
        names = [str(value) for value in gather(name)]
        if len(set(names)) > 1:
            calls = [f"rank {rank} calls {unit}" for rank, unit in enumerate(names)]
            raise StrategyUnavailable(
                strategy,
                "the ranks use different parts of the model in one step, and this strategy needs "
                f"the same ones on all: after {called[-1] if called else 'the start'}, "
                f"{listed(calls)}",
                "call every part on every rank, for example multiplied by zero, or use ddp with "
                "find_unused_parameters: true",
            )
        called.append(name)

    def before(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if name not in called:
                compare(name)

        return hook

    handles = [
        unit.register_forward_pre_hook(before(name), prepend=True)
        for name, unit in units.items()
        if unit is not root
    ]
    handles.append(root.register_forward_hook(lambda *_: compare(END)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def refusal_of(error: Exception, strategy: str | None) -> StrategyUnavailable | None:
    """Explain an error of the compiler, or of a `strategy` that shards; return None for others."""
    if type(error).__module__.startswith(COMPILERS):
        message = str(error).strip().partition("\n")[0]
        return StrategyUnavailable(
            strategy or "compile",
            f"torch.compile cannot compile this model here ({message})",
            "set recipe.compile to none",
        )
    frames = traceback.extract_tb(error.__traceback__)
    in_deepspeed = any("/deepspeed/" in frame.filename for frame in frames[-1:])
    in_backward = any(frame.name == BACKWARD for frame in frames)
    if strategy is None or not (
        NOT_GATHERED.search(str(error))
        or (FLAT.search(str(error)) and in_backward)
        or (isinstance(error, IndexError) and in_deepspeed)
    ):
        return None
    return StrategyUnavailable(
        strategy,
        "the backward pass needs parameters that are sharded again: the model takes derivatives "
        f"itself, or returns an object in which {strategy} sees no tensors ({error})",
        "return tensors, a dictionary or a data class, and take derivatives inside of the model "
        "under fsdp with wrap: root; or use ddp",
    )
