"""What answers at once imports none of the heavy libraries; seen in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardmark.cli.list import KINDS
from tests.golden.invented import write_run
from tests.unit.export.runs import exportable
from tests.unit.report_compare.test_cli import trials
from tests.unit.workloads import coco_folder, detection_folder

GOLDEN = Path(__file__).parents[1] / "golden" / "v1"
NUMBERS = {"torch", "numpy", "scipy", "pandas", "sklearn", "torchvision", "deepspeed"}
DRAWING = {"vl_convert", "jinja2"}
PICTURES = {"torch", "torchvision", "sklearn", "timm", "PIL"}

STEPS: dict[str, tuple[str, set[str]]] = {
    "table of strategies": (
        """
from shardmark.strategies import STRATEGIES, build_strategy
for name in STRATEGIES:
    build_strategy(name, {}).loads()
""",
        NUMBERS | DRAWING,
    ),
    "engines and nodes": (
        "import shardmark.launch.engines, shardmark.launch.nodes.node",
        NUMBERS | DRAWING | {"ray", "submitit"},
    ),
    "help and lists": (
        f"""
from shardmark.cli import main
for arguments in (["--help"], ["run", "--help"], ["doctor", "--help"]):
    assert main(arguments) == 0, arguments
for kind in {KINDS!r}:
    assert main(["list", kind]) == 0, kind
""",
        NUMBERS | DRAWING,
    ),
    "compare": (
        """
from shardmark.cli import main
for more in ([], ["--epochs"], ["--against", "lamsal-2025"]):
    assert main(["compare", given["golden"], *more]) == 0, more
for more in ([], ["--pareto", "--scaling", "--epochs", "--time-to", "train_loss"]):
    assert main(["compare", given["run"], *more]) == 0, more
""",
        NUMBERS - {"numpy", "scipy"} | DRAWING,  # its intervals are scipy's
    ),
    "drawing of the page": (
        "import shardmark.report.figures.drawing",
        NUMBERS - {"numpy", "scipy"} | DRAWING,  # which `compare` has loaded
    ),
    "workloads": (
        """
from shardmark.workloads.vision import options as classification
from shardmark.workloads import datasets
from shardmark.workloads import models
from shardmark.workloads import check_data, options
check_data(options({"name": "classification", "model": "convnext_tiny"}))
check_data(options({"name": "classification", "dataset": "random", "model": "timm:resnet18"}))
""",
        PICTURES,
    ),
    "detection": (
        """
from shardmark.workloads import check_data, options
from shardmark.workloads.detection.options import DetectionOptions
for place in (given["detection"], given["coco"]):
    mapping = {"name": "detection", "dataset": "coco", "data_dir": place}
    for more in ({}, {"model": "maskrcnn_resnet50_fpn"}):
        check_data(options(mapping | more))
    check_data(DetectionOptions(dataset="coco", data_dir=place))
""",
        PICTURES - {"PIL"},  # it says which picture of a COCO folder cannot be read
    ),
    "presets": (
        """
from pathlib import Path
from shardmark.config.experiment import experiment_schema
from shardmark.config.load import load_experiment, preset_names, to_yaml
from shardmark.trials.matrix import expand
for name in preset_names():
    experiment = load_experiment(name)
    assert experiment.name == name, name
    assert expand(experiment, "cpu").trials
    path = Path(given["file"])
    path.write_text(to_yaml(experiment))
    assert load_experiment(path) == experiment, name
experiment_schema()
""",
        {"torch"},
    ),
    "what is measured from outside": (
        """
import shardmark.analysis.trial.summarise, shardmark.cli.doctor
import shardmark.measure.system.environment, shardmark.measure.system.machine_checks
import shardmark.measure.system.sampler
shardmark.measure.system.environment.machine()
""",
        {"torch"},
    ),
    "export to TensorBoard": (
        """
from shardmark.cli import main
assert main(["export", given["exported"], "--to", "tensorboard", "--out", given["events"]]) == 0
""",
        {"torch", "tensorflow", "mlflow", "wandb"},
    ),
}
"""One process takes them in this order: what one has loaded is loaded for all that follow."""

PROGRAM = """
import json, sys
given = json.loads(sys.argv[1])
loaded = {}
for name, code in json.loads(sys.argv[2]).items():
    exec(compile(code, name, "exec"), {"given": given})
    loaded[name] = [name for name in sys.modules if "." not in name]
print(json.dumps(loaded), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Step -> modules that the process has after it."""
    folder = tmp_path_factory.mktemp("light")
    given = {
        "golden": GOLDEN,
        "run": write_run(folder / "run", trials()),
        "detection": detection_folder.write(folder / "detection"),
        "coco": coco_folder.write_folder(folder / "coco"),
        "file": folder / "experiment.yaml",
        "exported": exportable(folder / "exported").path,
        "events": folder / "events",
    }
    texts = {name: str(path) for name, path in given.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDMARK_CACHE", str(folder / "cache"))
        codes = {name: code for name, (code, _) in STEPS.items()}
        command = [sys.executable, "-c", PROGRAM, json.dumps(texts), json.dumps(codes)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stderr.splitlines()[-1])
    return {name: set(modules) for name, modules in found.items()}


@pytest.mark.parametrize("name", STEPS)
def test_imports_nothing_heavy(loaded: dict[str, set[str]], name: str) -> None:
    assert "shardmark" in loaded[name]
    assert loaded[name] & STEPS[name][1] == set()
