"""Looks at the main thread weigh what it does by its time."""

from __future__ import annotations

import sys
import time
from collections import UserDict
from collections.abc import Iterator
from inspect import getsourcelines
from typing import Any

import pytest
import torch
from torch import nn

from shardmark.scripts.interventions import arguments, look
from shardmark.scripts.interventions.base import library_of, line_of
from shardmark.scripts.interventions.look import Look


def busy_and_idle() -> float:
    """Compute in Python, which delays looks, and wait; return Python's share of the time."""
    started = time.perf_counter()
    while time.perf_counter() < started + SECONDS: 1 + 1  # fmt: skip  # noqa: B018, E701
    computed = time.perf_counter() - started
    time.sleep(SECONDS)
    return computed / (time.perf_counter() - started)


SECONDS = 0.4


def installed(monkeypatch: pytest.MonkeyPatch, wrappers: dict[str, Any] | None = None) -> Look:
    """Looks that change nothing of torch; `wrappers` gets what they would call, by name."""
    found = {} if wrappers is None else wrappers

    def replace(owner: Any, name: str, wrapper: Any) -> None:
        found[f"{owner.__name__}.{name}"] = wrapper

    monkeypatch.setattr(look, "replace", replace)
    monkeypatch.setattr(arguments, "replace", lambda *_: None)
    looking = Look(None)
    looking.install()
    return looking


class Inner(nn.Module):
    def __init__(self, looking: Look) -> None:
        super().__init__()
        self.looking = looking

    def forward(self) -> str:
        return self.looking._kind_of(sys._getframe())


class OfLightning(Inner):
    def forward(self) -> tuple[str, str]:  # type: ignore[override]
        return self.training_step()

    def training_step(self) -> tuple[str, str]:
        return self.looking._kind_of(sys._getframe()), Inner(self.looking)()


def test_a_step_of_lightning_is_no_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    looking = installed(monkeypatch)
    assert OfLightning(looking)() == ("own_code", "forward")


class Own(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return closure(self)


def test_an_optimizers_closure_is_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    looking = installed(monkeypatch)
    kinds: list[str] = []

    def note(*_: Any) -> None:
        kinds.append(looking._kind_of(sys._getframe()))

    weight = torch.ones(1, requires_grad=True)
    torch.optim.SGD([weight]).step(note)
    Own([weight]).step(note)
    assert kinds == ["own_code", "update"]


def test_parameters_of_all_optimizers_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GAN has two, whose gradients are reduced in the same step."""
    wrappers: dict[str, Any] = {}
    looking = installed(monkeypatch, wrappers)
    one, other = nn.Linear(4, 4), nn.Linear(8, 8, bias=False)
    for parameters in (one.parameters(), other.parameters(), one.parameters()):
        optimizer = torch.optim.SGD(parameters)
        wrappers["Optimizer.__init__"](lambda _: None, optimizer)
    looking.passes_of_step = 4
    facts = looking.facts()
    assert (facts["trained_tensors"], facts["trained_bytes"]) == (3, 4 * (16 + 4 + 64))
    assert facts["passes"] == 2, "each of the three has one, and one has another"


@pytest.mark.parametrize(
    ("batch", "rows"),
    [(UserDict(text=torch.ones(2, 3)), [6]), ([{"a": [torch.ones(4)]}], [4]), (object(), [])],
)
def test_sizes_of_batches_are_known_or_missing(
    batch: object, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of transformers is a mapping; what holds no tensors that are seen has no size."""
    wrappers: dict[str, Any] = {}
    looking = installed(monkeypatch, wrappers)
    wrappers["_BaseDataLoaderIter.__next__"](lambda _: batch, object())
    wrappers["torch.autograd.backward"](lambda _: None, torch.ones(1))
    assert looking.facts()["rows"] == rows


def test_a_backward_pass_inside_of_another_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpointing computes so; accumulation counts the outer ones."""
    wrappers: dict[str, Any] = {}
    looking = installed(monkeypatch, wrappers)
    weight = torch.ones(1, requires_grad=True)

    def nested(_: Any) -> None:
        wrappers["torch.autograd.backward"](lambda _: None, weight)

    loss = weight * 2
    loss.register_hook(nested)  # type: ignore[no-untyped-call]
    wrappers["torch.autograd.backward"](lambda one: one.backward(), loss)
    assert looking.passes == 1


@pytest.fixture(autouse=True)
def switch_interval() -> Iterator[None]:
    seconds = sys.getswitchinterval()
    yield
    sys.setswitchinterval(seconds)


def test_looks_that_come_late_weigh_as_much_as_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    _, first = getsourcelines(busy_and_idle)
    seen = []
    for _ in range(5):  # other programs may delay looks, too
        looking = installed(monkeypatch)
        looking.begin()
        share = busy_and_idle()
        assert sys.getswitchinterval() == pytest.approx(look.SWITCH_SECONDS)
        facts: dict[str, dict[str, list[tuple[str, float]]]] = looking.facts()  # type: ignore[assignment]
        lines = {int(line.rpartition(":")[2]) - first: s for line, s in facts["lines"]["own_code"]}
        seen.append((lines[3], lines[5]))
        if seen[-1] == pytest.approx((share, 1 - share), abs=0.15):
            return
    pytest.fail(f"shares of computing and waiting: {seen}")


def test_torch_can_print_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that is held while a path is looked up holds tensors that torch makes views of."""

    def slowly(frame: Any) -> str | None:
        time.sleep(0.002)
        return line_of(frame)

    monkeypatch.setattr(look, "line_of", slowly)
    looking = installed(monkeypatch)
    looking.begin()
    values = torch.ones(64, 64)
    for _ in range(3000):
        assert repr(values + 1)
    assert looking.count
    looking.facts()


@pytest.mark.parametrize(
    ("packages", "library"),
    [
        (["transformers", "accelerate", "torch"], "transformers"),
        (["accelerate", "torch"], "accelerate"),
        (["torch"], ""),
        ([], ""),
    ],
)
def test_a_call_has_the_library_that_the_users_code_called(
    packages: list[str], library: str
) -> None:
    call: Any = lambda: library_of(sys._getframe(1))  # noqa: E731 - it is nested
    for package in reversed(packages):
        names: dict[str, Any] = {"call": call}
        file = f"/usr/lib/python3/site-packages/{package}/inside/file.py"
        exec(compile("def calling(): return call()", file, "exec"), names)
        call = names["calling"]
    assert call() == library
