"""Commands that answer at once import no heavy library, and nothing from a run's folder.

Seen in a process of its own, which works in the folder of a run that a stranger has prepared.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardmark.cli.list import KINDS
from tests import GOLDEN
from tests.golden.invented import write_run
from tests.unit.bench.report.export.runs import exportable
from tests.unit.bench.report.test_cli import trials
from tests.unit.extras.detection import detection_data

NUMBERS = {"torch", "numpy", "scipy", "pandas", "torchvision", "deepspeed"}
DRAWING = {"vl_convert", "jinja2"}
PICTURES = {"torch", "torchvision", "timm", "PIL"}

STEPS: dict[str, tuple[str, set[str]]] = {
    "table of strategies": (
        """
from shardmark.ranks.strategies import STRATEGIES, build_strategy
for name in STRATEGIES:
    build_strategy(name, {}).loads()
""",
        NUMBERS | DRAWING,
    ),
    "engines and nodes": (
        """
import shardmark.bench.launch.engines, shardmark.extras.engines.nodes.node
import shardmark.extras.engines.ray.engine, shardmark.extras.engines.slurm.engine
""",
        NUMBERS | DRAWING | {"ray"},
    ),
    "options of detection, before any other task": (
        "import shardmark.extras.detection.options",
        NUMBERS | DRAWING,
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
for more in ([], ["--view", "epochs"], ["--view", "study:lamsal-2025"]):
    assert main(["compare", given["golden"], *more]) == 0, more
for more in ([], ["--view", "scaling", "--view", "network", "--view", "time-to:train_loss"]):
    assert main(["compare", given["run"], *more]) == 0, more
""",
        NUMBERS - {"numpy", "scipy"} | DRAWING,  # its intervals are scipy's
    ),
    "drawing of the page": (
        "import shardmark.bench.report.figures.drawing",
        NUMBERS - {"numpy", "scipy"} | DRAWING,  # which `compare` has loaded
    ),
    "workloads": (
        """
from shardmark.ranks.workloads.vision import options as classification
from shardmark.ranks.workloads import datasets
from shardmark.ranks.workloads import models
from shardmark.ranks.workloads import check_data, options
check_data(options({"name": "classification", "model": "convnext_tiny"}))
check_data(options({"name": "classification", "dataset": "random", "model": "timm:resnet18"}))
""",
        PICTURES,
    ),
    "detection": (
        """
from shardmark.ranks.workloads import check_data, options
from shardmark.extras.detection.options import DetectionOptions
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
from shardmark.experiment.experiment import experiment_schema
from shardmark.experiment.load import load_experiment, preset_names, to_yaml
from shardmark.experiment.matrix import expand
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
import shardmark.bench.analysis.trial.summarise, shardmark.cli.doctor
import shardmark.ranks.measure.system.environment, shardmark.ranks.measure.system.machine_checks
import shardmark.ranks.measure.system.sampler
shardmark.ranks.measure.system.environment.machine()
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
    "a page and tables of a run": (
        """
from shardmark.cli import main
for place in (".", given["run"]):
    assert main(["compare", place]) == 0
    assert main(["report", place, "--no-images", "--out", given["page"]]) == 0
    assert main(["export", place, "--to", "csv", "--out", given["tables"]]) == 0
    assert main(["export", place, "--to", "torchrun", "--out", given["tables"]]) in (0, 2)
assert main(["run", "experiment.yaml", "--dry-run"]) in (0, 2)
""",
        {"torch"},
    ),
    "processes that verify": (
        """
import subprocess, sys
from shardmark.cli import main
from shardmark.bench.launch.local import fork_server
from shardmark.extras.engines.nodes.protocol import JoinOptions
assert main(["verify", "experiment.yaml", "--set", "matrix.strategy=nonsense"]) == 2
fork_server.PRELOADED = ("colorsys", "shardmark.ranks.trial")
server = fork_server.ForkServer()
server.load([], "cpu")
server.close()
node = JoinOptions(host="127.0.0.1", port=9, key={}, join_seconds=0.0).words()
ended = subprocess.run([sys.executable, *node], input="x" * 32, capture_output=True, text=True)
assert "no controller at 127.0.0.1:9" in ended.stderr, ended
""",
        {"torch"},
    ),
}
"""Steps of a single process, in this order: a module that one step loads stays loaded."""

PROGRAM = """
import json, sys
given = json.loads(sys.argv[1])
loaded = {}
for name, code in json.loads(sys.argv[2]).items():
    exec(compile(code, name, "exec"), {"given": given})
    loaded[name] = [name for name in sys.modules if "." not in name]
print(json.dumps(loaded), file=sys.stderr)
"""


PLANTED = (
    *("sitecustomize", "usercustomize", "conftest", "shardmark", "tests", "json", "colorsys"),
    *("torch", "numpy", "scipy", "pandas", "yaml", "pydantic", "typer", "jinja2", "vl_convert"),
)


def plant(run: Path) -> None:
    """Modules by names that somebody imports; what one of them does is seen in `ran.txt`."""
    told = run.parent / "ran.txt"
    for name in PLANTED:
        for place in (run, *(run / "trials").iterdir()):
            (place / f"{name}.py").write_text(f"print({name!r}, file=open({str(told)!r}, 'a'))\n")
    (run / "planted.pth").write_text(f"import sys; open({str(told)!r}, 'a').write('pth')\n")
    told.touch()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("light")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> dict[str, set[str]]:
    """Step -> modules that the process has after it."""
    given = {
        "golden": GOLDEN,
        "run": write_run(folder / "run", trials()),
        "detection": detection_data.write(folder / "detection"),
        "coco": detection_data.write_odd(folder / "coco"),
        "file": folder / "experiment.yaml",
        "exported": exportable(folder / "exported").path,
        "events": folder / "events",
        "page": folder / "page.html",
        "tables": folder / "tables",
    }
    plant(folder / "run")
    texts = {name: str(path) for name, path in given.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDMARK_CACHE", str(folder / "cache"))
        codes = {name: code for name, (code, _) in STEPS.items()}
        # The current folder is not on its path, as it is not on that of `shardmark`.
        words = [sys.executable, "-P", "-c", PROGRAM, json.dumps(texts), json.dumps(codes)]
        ended = subprocess.run(
            words, cwd=folder / "run", capture_output=True, text=True, check=False
        )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stderr.splitlines()[-1])
    return {name: set(modules) for name, modules in found.items()}


@pytest.mark.parametrize("name", STEPS)
def test_step_imports_no_heavy_library(loaded: dict[str, set[str]], name: str) -> None:
    assert "shardmark" in loaded[name]
    assert loaded[name] & STEPS[name][1] == set()


def test_no_code_of_a_run_s_folder_runs(loaded: dict[str, set[str]], folder: Path) -> None:
    assert "processes that verify" in loaded
    assert (folder / "ran.txt").read_text() == ""
