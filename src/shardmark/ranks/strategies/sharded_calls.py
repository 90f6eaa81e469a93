"""Errors of models whose calls do not suit sharded parameters, explained with a remedy."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from torch import Tensor, is_grad_enabled, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves  # torch has no public one

from shardmark.base.errors import StrategyUnavailable
from shardmark.ranks.strategies.base import first_names

NOT_GATHERED = re.compile(
    r"storage of size 0|tensor [ab] \(0\) must match|returned an invalid gradient .* got \[0\]"
    r"|differentiated Tensors? .*not .*been used in the graph"
)
"""Words of torch's errors about a parameter that is used while it is sharded."""
OPERATORS = re.compile(
    r"mixed torch.Tensor and DTensor|in-place operations that require placement changes"
    r"|does not have a sharding strategy registered"
)
"""Words of torch's errors about operators on sharded parameters."""
FLAT = re.compile(r"mat2 must be a matrix, got 1-D tensor")
"""Words of the same error in a backward pass.

In a forward pass, the user's own tensors may be the reason.
"""
BACKWARD = "_engine_run_backward"
"""Name of torch's function that runs every backward pass."""
FULL_PARAMETERS = (
    "compute it inside of the model's forward pass, or use a strategy that keeps parameters full "
    "(ddp, zro)"
)
COMPILERS = ("torch._dynamo.", "torch._inductor.")
END = "the end of the model"


@contextmanager
def equal_calls(
    strategy: str,
    root: nn.Module,
    units: Mapping[str, nn.Module],
    gather: Callable[[object], list[object]],
    *,
    trained: Mapping[str, nn.Module] | None = None,
) -> Iterator[None]:
    """Raise `StrategyUnavailable` if ranks call different units.  Collective.

    Ranks exchange the name of a unit before each call inside of the root, before its first call
    outside, and at the end of the root: the collectives of the library would end the process or
    wait forever.  At the end they exchange which of the `trained` modules were called, in case all
    of their gradients are reduced together.
    """
    called: list[str] = []
    used: set[str] = set()
    in_root = False

    def compare(name: str) -> None:
        names = [str(value) for value in gather(name)]
        if len(set(names)) > 1:
            calls = [f"rank {rank} calls {unit}" for rank, unit in enumerate(names)]
            place = called[-1] if called else "the start"
            raise _unlike(strategy, f"after {place}, {first_names(calls)}")
        called.append(name)

    def before(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if in_root or name not in called:  # activation checkpointing calls again, in backward
                compare(name)

        return hook

    def set_in_root(active: bool) -> None:
        nonlocal in_root
        in_root = active
        if active:
            return
        compare(END)
        if trained:
            ranks = [{*cast("list[str]", names)} for names in gather(sorted(used))]
            for rank, names in enumerate(ranks):
                if missing := sorted(set.union(*ranks) - names):
                    raise _unlike(strategy, f"rank {rank} does not call {first_names(missing)}")

    handles = [
        unit.register_forward_pre_hook(before(name), prepend=True)
        for name, unit in units.items()
        if unit is not root
    ]
    handles += [
        *(
            module.register_forward_pre_hook(partial(lambda name, *_: used.add(name), name))
            for name, module in (trained or {}).items()
        ),
        root.register_forward_pre_hook(lambda *_: set_in_root(True), prepend=True),
        root.register_forward_hook(lambda *_: set_in_root(False)),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _unlike(strategy: str, calls: str) -> StrategyUnavailable:
    return StrategyUnavailable(
        strategy,
        "the ranks use different parts of the model in one step, and this strategy needs the same "
        f"ones on all: {calls}",
        "call every part on every rank, for example multiplied by zero, or use ddp with "
        "find_unused_parameters: true",
    )


class ReadsOutside(TorchFunctionMode):
    """Refuses a loss that computes with shards of parameters, outside of the model's forward pass.

    Such as a penalty on `model.parameters()`: some libraries compute it of a rank's shards only.
    """

    def __init__(self, strategy: str, root: nn.Module) -> None:
        super().__init__()
        self._strategy, self._root = strategy, root
        self._in_forward = False

    def __enter__(self) -> ReadsOutside:
        self._handles = (
            self._root.register_forward_pre_hook(lambda *_: self._set(True), prepend=True),
            self._root.register_forward_hook(lambda *_: self._set(False)),
        )
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's
        for handle in self._handles:
            handle.remove()

    def _set(self, in_forward: bool) -> None:
        self._in_forward = in_forward

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._in_forward or not is_grad_enabled():
            return func(*args, **(kwargs or {}))
        try:
            result, failed = func(*args, **(kwargs or {})), None
        except (RuntimeError, TypeError) as error:
            result, failed = None, error
        derived = failed is not None or any(
            isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(result)
        )
        if derived and any(map(self._is_shard, tree_leaves((args, kwargs)))):
            raise StrategyUnavailable(
                self._strategy,
                "the loss computes with sharded parameters outside of the model's forward pass, by "
                f"{getattr(func, '__name__', func)}",
                FULL_PARAMETERS,
            ) from failed
        if failed is not None:
            raise failed
        return result

    def _is_shard(self, value: Any) -> bool:
        from torch.distributed.tensor import DTensor

        if not (isinstance(value, nn.Parameter) and value.requires_grad):
            return False
        partitioned = value.numel() != getattr(value, "ds_numel", value.numel())  # DeepSpeed's
        first = isinstance(self._root, FullyShardedDataParallel)
        return isinstance(value, DTensor) or partitioned or first


def refusal_of(error: Exception, strategy: str | None) -> StrategyUnavailable | None:
    """Explain an error of the compiler, or of a `strategy` that shards; return None for others."""
    if type(error).__module__.startswith(COMPILERS):
        message = str(error).strip().partition("\n")[0]
        return StrategyUnavailable(
            strategy or "compile",
            f"torch.compile cannot compile this model here ({message})",
            "set recipe.compile to none",
        )
    if strategy is not None and OPERATORS.search(str(error)):
        return StrategyUnavailable(
            strategy,
            "the loss or the optimizer computes with sharded parameters by an operator that takes "
            f"full ones ({error})",
            FULL_PARAMETERS,
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
