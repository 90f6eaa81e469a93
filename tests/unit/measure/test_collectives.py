"""The counter of collectives, without any: what it takes for one, and how it counts."""

from __future__ import annotations

from typing import Any

import torch

from shardmark.measure.step.collectives import KINDS, CollectiveCounter, flat
from shardmark.results.schema import CollectiveRecord


class Operator:
    """Stands for one of torch's: its text is its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __str__(self) -> str:
        return self._name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def test_flat_finds_tensors_in_nested_lists() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert [t.numel() for t in flat([a, (b, [c, None, "x"])])] == [1, 2, 3]
    assert list(flat(None)) == []


def test_operators_without_collectives_count_nothing() -> None:
    with CollectiveCounter() as counter:
        parameter = torch.ones(3, requires_grad=True)
        parameter.square().sum().backward()  # type: ignore[no-untyped-call]
    assert counter.counts == {}
    assert parameter.grad is not None


def test_calls_and_the_bytes_of_their_input_are_counted() -> None:
    counter = CollectiveCounter()
    large, small = torch.zeros(8), torch.zeros(2, dtype=torch.bfloat16)

    def call(name: str, *args: Any) -> None:
        assert counter.__torch_dispatch__(Operator(name), (), args, {"x": 1}) == (args, {"x": 1})

    call("c10d.allreduce_.default", [large, small], "group")
    call("c10d.allreduce_.default", [small], "group")
    call("c10d._allgather_base_.default", large, small, "group")
    call("c10d.reduce_scatter_.default", [small], [[large, large]], "group")
    call("c10d.barrier.default")
    call("c10d.monitored_barrier_.default", "group")
    call("aten.add.Tensor", large, large)
    assert counter.counts == {
        "all_reduce": CollectiveRecord(calls=2, payload_bytes=32 + 4 + 4),
        "all_gather": CollectiveRecord(calls=1, payload_bytes=4),
        "reduce_scatter": CollectiveRecord(calls=1, payload_bytes=64),
        "barrier": CollectiveRecord(calls=1, payload_bytes=0),
        "monitored_barrier": CollectiveRecord(calls=1, payload_bytes=0),
    }


def test_every_operator_in_the_table_is_torch_s() -> None:
    """A name that torch does not know (any more) would never be counted."""
    import torch.distributed  # registers them

    assert torch.distributed.is_available()
    known = {name.partition("::")[2].partition(".")[0] for name in _registered()}
    assert set(KINDS) <= known


def _registered() -> list[str]:
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return [name for name in names if name.startswith("c10d::")]
