"""Canaries: private attributes and defaults of the installed DeepSpeed, read from its source."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.unit.ranks.strategies.test_zero import ADAM_ARGUMENTS, OTHER_KEYS, written, zero  # noqa: F401

pytestmark = pytest.mark.canary


@cache
def source(file: str) -> str:
    """Source of a module of DeepSpeed's runtime, whose import takes seconds."""
    package = metadata.distribution("deepspeed").locate_file("deepspeed")
    return (Path(str(package)) / "runtime" / file).read_text()


def test_private_attributes_are_defined_where_the_worker_reads_them(zero: Any) -> None:  # noqa: F811
    assert metadata.version("deepspeed").startswith("0.19.")
    gradients, replaced = zero.GRADIENTS, zero.REPLACED
    first = (zero.REPLICATED_PARAMETERS, zero.MASTERS[0], *gradients[:3], zero.STATES_LINKED)
    third = (zero.COMPUTED_PARTITIONS, zero.MASTERS[1], gradients[0], *gradients[2:])
    assigned = {
        "engine.py": (zero.ENGINE_SCALER,),
        "zero/stage_1_and_2.py": (*first, *replaced),
        "zero/stage3.py": (*third, *replaced),
    }
    for file, names in assigned.items():
        for name in names:
            plain_name = name.removeprefix("_DeepSpeedZeroOptimizer_Stage3")
            assert re.search(rf"self\.{plain_name}\b *(:[^=\n]*)?=", source(file)), (file, name)


def defaults_of_deepspeed() -> dict[str, Any]:
    """Defaults of stage 3 by key, from `name: type = Field(default, alias=key)`."""
    classes = {
        c.name: c for c in ast.parse(source("zero/config.py")).body if isinstance(c, ast.ClassDef)
    }
    fields = (f for f in classes["DeepSpeedZeroConfig"].body if isinstance(f, ast.AnnAssign))
    return dict(key_and_default(field) for field in fields)


def key_and_default(field: ast.AnnAssign) -> tuple[str, Any]:
    assert isinstance(field.target, ast.Name)
    name, value = field.target.id, field.value
    if not isinstance(value, ast.Call):
        return name, constant(value)
    keywords = {keyword.arg: keyword.value for keyword in value.keywords}
    if "deprecated" in ast.unparse(value):
        return f"deprecated {name}", None
    default = value.args[0] if value.args else keywords.get("default")
    return constant(keywords.get("alias")) or name, constant(default)


def constant(value: ast.expr | None) -> Any:
    """A literal, or the first argument of `pp_int`, which only changes how a number prints."""
    if isinstance(value, ast.Call) and value.args:
        value = value.args[0]
    if value is not None and ast.unparse(value) == "sys.maxsize":
        return sys.maxsize
    return value.value if isinstance(value, ast.Constant) else None


def test_every_default_of_stage_3_is_written_out() -> None:
    defaults = defaults_of_deepspeed()
    keys = {key for key in defaults if key.startswith("stage3_")} | set(OTHER_KEYS)
    assert len(keys) > len(OTHER_KEYS) + 5
    config = written(3)["zero_optimization"]
    assert {key: config.get(key) for key in keys} == {key: defaults[key] for key in keys}


def test_every_argument_of_cpu_adam_is_given() -> None:
    tree = ast.parse(source("../ops/adam/cpu_adam.py"))
    init = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    assert {argument.arg for argument in init.args.args} - {
        "self",
        "model_params",
    } == ADAM_ARGUMENTS


def test_the_throughput_timer_is_on_by_default() -> None:
    timers = source("../utils/config.py")
    assert re.search(r'TIMERS = "timers"\nTIMERS_THROUGHPUT = "throughput"', timers)
    assert "    enabled: bool = True" in timers
