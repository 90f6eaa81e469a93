"""Strategies and workloads of another installed package, found by its entry points."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardmark.base.errors import InputError
from shardmark.cli.list import listing
from shardmark.experiment.load import from_mapping
from shardmark.experiment.matrix import expand
from shardmark.ranks.strategies import build_strategy, strategy_factory
from shardmark.ranks.trial import Trial
from shardmark.ranks.workloads import build_workload, check_data, options_class

ENTRY_POINTS = """
[shardmark.strategies]
outside-ddp = outside.strategy:OutsideDDP
broken-ddp = outside.broken:Broken
no-strategy = outside.options:OutsideOptions
ddp = outside.broken:Broken

[shardmark.workloads]
outside-pictures = outside.options:OutsideOptions
broken-pictures = outside.missing:Options
"""
MODULES = {
    "__init__": "",
    "broken": "raise RuntimeError('no libfast.so')\n",
    "strategy": '''
from dataclasses import dataclass
from shardmark.ranks.strategies.ddp import DDP

@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideDDP(DDP):
    """Replicas from another package."""

    name: str = "outside"
    waits: int = 0
''',
    "options": '''
from typing import Literal
from shardmark.ranks.workloads.options import WorkloadOptions

class OutsideOptions(WorkloadOptions):
    """Pictures from another package."""

    verified_samples = 8
    name: Literal["outside-pictures"] = "outside-pictures"
    colours: int = 3
''',
    "data": "def check(options):\n    return 12\n\ndef paths(options):\n    return ()\n",
    "task": "def build(options, seed):\n    return (options.colours, seed)\n",
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed package, as pip leaves one."""
    folder = tmp_path_factory.mktemp("site")
    information = folder / "outside_shardmark-1.0.dist-info"
    for path in (folder / "outside", information):
        path.mkdir()
    for name, source in MODULES.items():
        (folder / "outside" / f"{name}.py").write_text(source)
    (information / "METADATA").write_text("Name: outside-shardmark\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


@pytest.fixture
def importable(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(installed))
    strategy_factory.cache_clear()
    options_class.cache_clear()


def experiment(**changes: object) -> dict[str, object]:
    return {
        "name": "outside",
        "workload": {"name": "outside-pictures", "colours": 4},
        "recipe": {"steps": 20, "global_batch": 4},
        "matrix": {
            "strategy": ["ddp", {"name": "outside-ddp", "waits": 2}],
            "workload.colours": [1, 2],
        },
        **changes,
    }


@pytest.mark.usefixtures("importable")
def test_experiment_names_a_plugin() -> None:
    trials = expand(from_mapping(experiment()), "cpu").trials
    assert {trial.strategy.name for trial in trials} == {"ddp", "outside-ddp"}
    strategies = [trial.built_strategy for trial in trials if trial.strategy.name == "outside-ddp"]
    assert {(strategy.name, strategy.waits) for strategy in strategies} == {("outside-ddp", 2)}  # type: ignore[attr-defined]
    (first, *_) = trials
    again = Trial.model_validate_json(first.model_dump_json())
    assert again.workload == first.workload
    assert check_data(again.workload) == 12
    workload: object = build_workload(again.workload, seed=5)
    assert workload == (1, 5)


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"matrix": {"strategy": ["broken-ddp"]}}, "RuntimeError: no libfast.so"),
        ({"matrix": {"strategy": ["no-strategy"]}}, "OutsideOptions is no subclass of Strategy"),
        ({"workload": {"name": "broken-pictures"}}, "No module named 'outside.missing'"),
    ],
)
def test_broken_plugin_is_named_with_its_package(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(InputError, match="of package outside-shardmark") as caught:
        from_mapping(experiment(**changes))
    assert problem in str(caught.value)
    assert "repair or uninstall outside-shardmark" in str(caught.value)


@pytest.mark.usefixtures("importable")
def test_wrong_options_of_plugins_are_reported_as_of_built_in_strategies() -> None:
    with pytest.raises(InputError, match="waitz"):
        from_mapping(experiment(matrix={"strategy": [{"name": "outside-ddp", "waitz": 2}]}))
    with pytest.raises(InputError, match="colour"):
        from_mapping(experiment(workload={"name": "outside-pictures", "colour": 1}))
    with pytest.raises(InputError, match="did you mean 'outside-ddp'"):
        build_strategy("outside-dp", {})


@pytest.mark.usefixtures("importable")
def test_list_shows_plugins_and_built_in_names_take_precedence() -> None:
    strategies, workloads = listing("strategies"), listing("workloads")
    assert strategies["outside-ddp"] == "Replicas from another package."
    assert "outside-shardmark" in strategies["broken-ddp"]
    assert "full replica" in strategies["ddp"]
    assert workloads["outside-pictures"] == "Pictures from another package."
    assert "outside-shardmark" in workloads["broken-pictures"]


def test_plugins_are_imported_on_first_use(installed: Path) -> None:
    program = """
import sys
from shardmark.experiment.load import load_experiment
from shardmark.experiment.matrix import expand
expand(load_experiment("language-quickstart"), "cpu")
assert "outside" not in sys.modules
"""
    path = os.pathsep.join([str(installed), *sys.path])
    subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": path}, check=True)
