"""A model of a notebook or a script becomes a module that runs without it."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardmark.base.errors import InputError
from shardmark.experiment.model_source import by_name, model_name
from shardmark.ranks.workloads.model_building import user_function
from shardmark.ranks.workloads.models import check_model_name

FIRST_CELL = """\
import math
import functools as tools
from collections import OrderedDict as Ordered
from dataclasses import dataclass

WIDTH, NAMES = 3, ("a", {"b": [1.5, None]})
calls = []  # of the notebook, not of the model

def scaled(value, by=WIDTH):
    return math.floor(value) * by

def logged(function):
    @tools.wraps(function)
    def inner(*values, **named):
        return function(*values, **named)
    return inner

class Base:
    kind = "base"

    @staticmethod
    def double(value: "Unknown") -> "Unknown":
        return 2 * value
"""
SECOND_CELL = """\
calls.append(1)

@dataclass
class Net(Base):
    num_classes: int

    @logged
    def answer(self) -> Missing:
        if self.num_classes > 100:
            return build(num_classes=1)
        return Ordered(scaled=scaled(2.5), double=self.double(self.num_classes), names=NAMES)

@logged
def build(num_classes, width=WIDTH):
    return Net(num_classes=num_classes)

Alias = Net
opened = open
token = object()

def uses_token(num_classes):
    return token, opened

def outer():
    def inner(num_classes):
        return num_classes
    class Local:
        pass
    return inner, Local

class Bare:
    pass
"""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two cells that ran in `__main__`; their source is where notebooks keep it."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    for name, text in (("<cell 1>", FIRST_CELL), ("<cell 2>", SECOND_CELL)):
        code = "from __future__ import annotations\n" + text
        monkeypatch.setitem(
            linecache.cache, name, (len(code), None, code.splitlines(keepends=True), name)
        )
        exec(compile(code, name, "exec"), vars(main))
    return vars(main)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


def built(name: str) -> Any:
    """Build the model as a rank does."""
    check_model_name(name)
    function: Callable[..., Any] = user_function(name)
    return function(num_classes=10)


@pytest.mark.parametrize("name", ["Net", "build", "Alias"])
def test_definition_includes_what_it_uses(notebook: dict[str, Any], name: str) -> None:
    written = model_name(notebook[name], Path("runs/models"))
    path = Path(written.rpartition(":")[0])
    assert path.parent == Path("runs/models")
    text = path.read_text()
    assert "calls" not in text
    for once in ("class Net", "class Base", "def scaled"):
        assert text.count(once) == 1
    del notebook["Net"]  # ranks have no notebook
    answer = built(written).answer()
    assert dict(answer) == {"scaled": 6, "double": 20, "names": ("a", {"b": [1.5, None]})}


def test_file_name_depends_on_the_text(notebook: dict[str, Any]) -> None:
    first = model_name(notebook["build"], Path("models"))
    assert model_name(notebook["build"], Path("models")) == first
    notebook["WIDTH"] = 4
    assert model_name(notebook["build"], Path("models")) != first
    assert len([*Path("models").iterdir()]) == 2


def test_models_in_a_mapping_become_names(notebook: dict[str, Any]) -> None:
    given = {"matrix": {"workload.model": ["resnet18", notebook["Net"]]}, "data_dir": Path("x")}
    named = by_name(given, Path("models"))
    assert named["data_dir"] == "x"
    assert named["matrix"]["workload.model"][0] == "resnet18"
    assert named["matrix"]["workload.model"][1].startswith("models/Net_")


def test_importable_model_keeps_its_module() -> None:
    from torch import nn

    assert model_name(nn.Linear, Path("models")) == "torch.nn.modules.linear:Linear"
    assert not Path("models").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("uses_token", "it uses 'token', an object of object"),
        ("inner", "is defined inside another"),
        ("Local", "is defined inside another"),
        ("instance", "found an object of Net"),
        ("Bare", "the source of Bare cannot be found"),
    ],
)
def test_model_without_source_is_refused(notebook: dict[str, Any], name: str, message: str) -> None:
    notebook["inner"], notebook["Local"] = notebook["outer"]()
    notebook["instance"] = notebook["Net"](num_classes=1)
    notebook["instance"].__class__.__call__ = notebook["scaled"]
    with pytest.raises(InputError, match=message):
        model_name(notebook[name], Path("models"))
    assert not Path("models").exists()


def test_missing_model_file_or_name_is_reported() -> None:
    Path("cnn.py").write_text("def small(num_classes):\n    return num_classes\n")
    assert built("cnn.py:small") == 10
    for name, message in (("gone.py:small", "no file 'gone.py'"), ("cnn.py:big", "has no 'big'")):
        with pytest.raises(ValueError, match=message):
            check_model_name(name)
