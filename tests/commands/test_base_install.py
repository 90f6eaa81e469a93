"""Without its extras the package plans, compares, lists and checks; all else names its extra.

The commands run in one process in which the optional modules cannot be imported.
"""

from __future__ import annotations

import json
import sys

import pytest

from shardmark.base.system.extras import EXTRAS
from tests import GOLDEN
from tests.programs import output_of

PROGRAM = """
import contextlib, io, json, sys
for module in json.loads(sys.argv[1]):
    sys.modules[module] = None
from shardmark.cli import main
ended = []
for words in json.loads(sys.argv[2]):
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main(words)
    ended.append([code, output.getvalue()])
print(json.dumps(ended))
"""
WORKING = [
    ["plan", "language-quickstart", "--on", "dgx-h100"],
    ["compare", str(GOLDEN)],
    ["doctor"],
    ["list", "models"],
]
REFUSED = {
    ("plan", "quickstart", "--on", "dgx-h100"): "vision",
    ("run", "quickstart"): "vision",
    ("run", "detection-quickstart"): "detection",
    ("verify", "gpt2-124m"): "language",
    ("verify", "quickstart", "--set", "workload.model=timm:vit_tiny_patch16_224"): "timm",
    ("verify", "quickstart", "--set", "workload.model=vgg19"): "vision",
    ("report", str(GOLDEN), "--out", "page.html"): "figures",
    ("compare", str(GOLDEN), "--format", "latex"): "tables",
    ("export", str(GOLDEN), "--to", "csv", "--out", "tables"): "tables",
    ("export", str(GOLDEN), "--to", "mlflow", "--out", "mlruns"): "mlflow",
    ("export", str(GOLDEN), "--to", "tensorboard", "--out", "events"): "tensorboard",
    ("export", str(GOLDEN), "--to", "wandb", "--out", "wandb"): "wandb",
    ("export", str(GOLDEN), "--to", "trackio", "--out", "trackio"): "trackio",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], tuple[int, str]]:
    """Exit code and output of each command."""
    commands = [*map(tuple, WORKING), *REFUSED]
    words = (sys.executable, "-c", PROGRAM, json.dumps([*EXTRAS]), json.dumps(commands))
    printed = output_of(*words, cwd=tmp_path_factory.mktemp("base"))
    outcomes = json.loads(printed.splitlines()[-1])
    return {command: tuple(pair) for command, pair in zip(commands, outcomes, strict=True)}


@pytest.mark.parametrize("command", WORKING, ids=" ".join)
def test_base_install_runs_commands_without_extras(
    ended: dict[tuple[str, ...], tuple[int, str]], command: list[str]
) -> None:
    code, output = ended[tuple(command)]
    assert code == 0, output


@pytest.mark.parametrize(("command", "extra"), REFUSED.items())
def test_a_missing_library_is_one_message_with_its_extra(
    ended: dict[tuple[str, ...], tuple[int, str]], command: tuple[str, ...], extra: str
) -> None:
    code, output = ended[command]
    assert (code, "Traceback" in output) == (2, False), output
    assert f"pip install 'shardmark[{extra}]'" in output.replace("\n", "").replace("  ", " ")


def test_a_strategy_is_predicted_without_its_library(
    ended: dict[tuple[str, ...], tuple[int, str]],
) -> None:
    """The machines of a plan are other ones."""
    _, output = ended[tuple(WORKING[0])]
    assert "zero-1" in output
    assert "not installed" not in output
