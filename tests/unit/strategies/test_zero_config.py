"""What stage 3 does with parameters is written out, and is DeepSpeed's default unless asked."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from shardmark.strategies import build_strategy
from shardmark.strategies.base import RankContext
from shardmark.strategies.deepspeed.strategy import Zero
from tests.unit.training.toy import CPU, recipe

PREFIX = "stage3_"
OTHER_KEYS = (
    *("sub_group_size", "zero_hpz_partition_size", "memory_efficient_linear"),
    *(f"zero_quantized_{what}" for what in ("weights", "nontrainable_weights", "gradients")),
)


def written(stage: Any = 3, **options: Any) -> dict[str, Any]:
    process = RankContext(rank=0, world_size=2, local_rank=0, local_world_size=2, device=CPU)
    config = Zero(stage=stage, **options).config(recipe(), process)
    return cast("dict[str, Any]", config["zero_optimization"])


def defaults_of_deepspeed() -> dict[str, Any]:
    """Key -> default, read from DeepSpeed's source: importing it takes seconds."""
    package = importlib.util.find_spec("deepspeed")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "runtime" / "zero" / "config.py"
    classes = {c.name: c for c in ast.parse(path.read_text()).body if isinstance(c, ast.ClassDef)}
    fields = (f for f in classes["DeepSpeedZeroConfig"].body if isinstance(f, ast.AnnAssign))
    return dict(key_and_default(field) for field in fields)


def key_and_default(field: ast.AnnAssign) -> tuple[str, Any]:
    """From `name: type = default` or `name: type = Field(default, alias=key)`."""
    assert isinstance(field.target, ast.Name)
    name, value = field.target.id, field.value
    if not isinstance(value, ast.Call):
        return name, plain(value)
    keywords = {keyword.arg: keyword.value for keyword in value.keywords}
    if "deprecated" in ast.unparse(value):
        return f"deprecated {name}", None
    default = value.args[0] if value.args else keywords.get("default")
    return plain(keywords.get("alias")) or name, plain(default)


def plain(value: ast.expr | None) -> Any:
    """A constant, or the first argument of `pp_int`, which only changes how a number prints."""
    if isinstance(value, ast.Call) and value.args:
        value = value.args[0]
    if value is not None and ast.unparse(value) == "sys.maxsize":
        return sys.maxsize
    return value.value if isinstance(value, ast.Constant) else None


def test_nothing_of_stage_3_is_left_to_a_hidden_default() -> None:
    defaults = defaults_of_deepspeed()
    keys = {key for key in defaults if key.startswith(PREFIX)} | set(OTHER_KEYS)
    assert len(keys) > len(OTHER_KEYS) + 5
    config = written()
    assert {key: config.get(key) for key in keys} == {key: defaults[key] for key in keys}


def test_what_is_kept_between_forward_and_backward_is_an_option() -> None:
    config = written(max_reuse_distance=0, max_live_parameters=7)
    assert config["stage3_max_reuse_distance"] == 0
    assert config["stage3_max_live_parameters"] == 7
    plain_config = written()
    assert plain_config["stage3_max_reuse_distance"] == 10**9
    assert plain_config["stage3_max_live_parameters"] == 10**9


def test_settings_record_what_the_configuration_says() -> None:
    strategy = build_strategy("zero-3", {"max_reuse_distance": 5, "persistence_threshold": 0})
    recorded = {k: v for k, v in strategy.settings(recipe()).items() if k.startswith(PREFIX)}
    config = written(max_reuse_distance=5, persistence_threshold=0)
    assert recorded == {k: v for k, v in config.items() if k.startswith(PREFIX)}
    assert recorded["stage3_max_reuse_distance"] == 5


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_other_stages_have_no_keys_of_stage_3(stage: int) -> None:
    keys = {*written(stage), *build_strategy(f"zero-{stage}", {}).settings(recipe())}
    assert not {key for key in keys if key.startswith(PREFIX) or key in OTHER_KEYS}
