"""The pages say what the program does: their commands parse, their experiments validate."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
import yaml
from pydantic import BaseModel

import shardmark
from shardmark.base.files.strict_yaml import parse_yaml
from shardmark.base.machine import Machine
from shardmark.base.metrics import METRICS
from shardmark.cli import app
from shardmark.cli.init import CODE_FILES
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.load import from_mapping, load_experiment, preset_names, preset_text
from shardmark.experiment.matrix import expand
from shardmark.ranks.strategies import STRATEGIES, option_names
from shardmark.ranks.workloads.datasets import DATASETS
from shardmark.ranks.workloads.models import MODELS
from shardmark.ranks.workloads.vision.options import ClassificationOptions
from tests import ROOT, present
from tests.docs.pages import PAGES, README, blocks, cases, inline_commands, own_commands, parse
from tests.programs import output_of

CONSTRAINTS = ROOT / "constraints.txt"
LINK = re.compile(r"\[[^]]*\]\(([^)#]+)\)")
MARKED = re.compile(
    r"<!-- test-command -->\n```bash\n(.*?)\n```\n<!-- /test-command -->", re.DOTALL
)
MACHINE = Machine(device_type="cpu", device_count=0, cores=2)


@pytest.mark.parametrize("arguments", cases(own_commands()) + cases(inline_commands()))
def test_commands_parse(arguments: list[str]) -> None:
    given = parse(arguments)
    source = given.get("experiment")
    if source is not None and not source.endswith(".yaml"):
        expand(load_experiment(source, given["overrides"] or ()), "cpu")


def test_the_readme_is_short() -> None:
    assert README.read_text(encoding="utf-8").count("\n") <= 130


def test_every_verb_is_in_the_readme() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    text = README.read_text(encoding="utf-8")
    assert [verb for verb in group.commands if f"`{verb}`" not in text] == []


@pytest.mark.parametrize("text", cases(blocks("yaml")))
def test_experiments_validate(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is a part of an experiment completes the preset `quickstart`."""
    for _, code in blocks("python"):
        name = code.partition("\n")[0].removeprefix("# ")
        if name.endswith(".py"):
            (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    part = parse_yaml(text, "block")
    assert part.keys() <= Experiment.model_fields.keys()
    base = {} if "matrix" in part else parse_yaml(preset_text("quickstart"), "preset")
    assert expand(from_mapping({**base, **part}), "cpu").trials


def keys_of(model: type[BaseModel]) -> Iterator[str]:
    """The keys of a mapping and of the mappings in it; a named kind has keys of its own."""
    for name, field in model.model_fields.items():
        yield name
        if name in ("workload", "engine"):
            continue
        inner = (field.annotation, *get_args(field.annotation))
        for kind in inner:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from keys_of(kind)


def test_the_complete_example_has_every_key() -> None:
    """A key that excludes another stands in a comment.  The mapping itself loads, as all do."""
    page = ROOT / "docs" / "guides" / "complete-experiment.md"
    ((_, text),) = blocks("yaml", page)
    keys = {*keys_of(Experiment), *keys_of(ClassificationOptions)}
    assert {"gradient_clipping", "at_least", "nodes", "trial_seconds", "betas"} <= keys
    given = set(re.findall(r"^ *(?:# )?(?:\w+\.)?(\w+):", text, re.MULTILINE))
    assert keys - given == set()
    assert "strategy" in given


@pytest.mark.parametrize("text", cases(blocks("python")))
def test_python_compiles(text: str) -> None:
    compile(text, "block", "exec")


def test_the_example_of_a_model_makes_logits() -> None:
    import torch

    (code,) = (text for _, text in blocks("python") if text.startswith("# my_models.py"))
    made: dict[str, Any] = {"__name__": "my_models"}
    exec(code, made)
    logits = made["small"](num_classes=10, width=16)(torch.zeros(2, 3, 32, 32))
    assert logits.shape == (2, 10)


@pytest.mark.parametrize(
    "name", [kind.value for kind, file in CODE_FILES.items() if file == "my_task.py"]
)
def test_the_guide_s_own_tasks_are_those_that_init_writes(name: str) -> None:
    template = (files("shardmark.experiment") / "templates" / f"{name}.py").read_text(
        encoding="utf-8"
    )
    guide = {"rl": "reinforcement-learning"}.get(name, "own-task")
    page = ROOT / "docs" / "guides" / f"{guide}.md"
    assert template in [code.partition("\n")[2] for _, code in blocks("python", page)]
    assert name != "tokens" or template.count("\n") <= 40


def test_metrics_are_explained() -> None:
    text = (ROOT / "docs" / "method" / "measurement.md").read_text(encoding="utf-8")
    assert [name for name in METRICS if f"`{name}`" not in text] == []


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_and_their_options_are_in_the_reference(name: str) -> None:
    text = (ROOT / "docs" / "guides" / "strategies.md").read_text(encoding="utf-8")
    assert f"| `{name}` |" in text
    for option in option_names(name):
        assert f"`{option}`" in text, option


def test_presets_data_sets_and_models_are_in_the_pages() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    names = (*preset_names(), *DATASETS, *(name for name in MODELS if "_v2_" not in name))
    assert [name for name in names if f"`{name}`" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_a_target(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_ci_runs_the_readmes_command() -> None:
    """The program that finds the command is the one of `.ci/run`."""
    marked = present(MARKED.search(README.read_text(encoding="utf-8")))
    file = ROOT / ".ci" / "run"
    assert file.stat().st_mode & 0o111, "not executable"
    output_of("bash", "-n", file)
    script = file.read_text(encoding="utf-8")
    program = present(re.search(r"awk '([^']+)' README\.md", script))
    assert output_of("awk", program[1], README).strip() == marked[1]
    parts = ("constraints.txt", "'.[test]'", "ruff check .", "ruff format", "lint-imports", "mypy")
    for part in (*parts, "pytest"):
        assert part in marked[1]


def test_pre_commit_runs_the_readmes_checks() -> None:
    marked = present(MARKED.search(README.read_text(encoding="utf-8")))
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    for repository in config["repos"]:
        assert repository["repo"] == "local"
        for hook in repository["hooks"]:
            assert hook["language"] == "system"
            assert f"&& {hook['entry']} &&" in marked[1]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_constraints_are_exact_and_cover_the_projects_dependencies() -> None:
    text = CONSTRAINTS.read_text(encoding="utf-8")
    assert "://" not in text
    assert "--" not in text
    pins = [line.split("==") for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.+-]+", version) for _, version in pins)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(name for extra in extras for name in extra)]
    names = {normal(re.split(r"[^\w.-]", requirement)[0]) for requirement in wanted}
    assert names - {normal(name) for name, _ in pins} == {"shardmark"}, "extras name others"


def test_version_is_written_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" in project["dynamic"]
    assert f"## {shardmark.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
