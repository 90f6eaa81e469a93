"""The published package: a wheel that works where it is installed, and files beside it."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable, Iterable, Iterator
from email import message_from_bytes
from email.message import Message
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import shardmark
from tests import ROOT
from tests.programs import output_of

BUILD = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"


def run(*command: str | Path, cwd: Path) -> str:
    """Return the output of a command, which does not see this checkout."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return output_of(*command, cwd=cwd, env=variables)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, by what pip calls, without asking any index."""
    copy, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    run(sys.executable, "-c", BUILD, str(made), cwd=copy)
    (path,) = made.glob("*.whl")
    return path


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def required(requirements: Iterable[str], extras: Iterable[str]) -> Iterator[Distribution]:
    """Yield the installed distributions that the requirements need, directly or not."""
    waiting = [(text, frozenset(extras)) for text in requirements]
    seen = set()
    while waiting:
        text, wanted = waiting.pop()
        requirement = Requirement(text)
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in (wanted or {""})):
            continue
        key = (requirement.name.lower(), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        if requirement.name == "shardmark":  # an extra that consists of others
            waiting += [(text, key[1]) for text in requirements]
            continue
        found = distribution(requirement.name)
        yield found
        waiting += [(text, key[1]) for text in found.requires or ()]


Environments = Callable[[str], Path]


@pytest.fixture(scope="module")
def environments(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environments:
    """Return a function that makes a virtual environment with the wheel, and its programs' folder.

    What the wheel requires is linked from this environment, and nothing else: no gigabyte of torch
    is copied, and a library that the wheel does not name is absent.
    """
    made: dict[str, Path] = {}

    def environment_with(extra: str) -> Path:
        if extra in made:
            return made[extra]
        place = tmp_path_factory.mktemp(extra or "base") / "environment"
        venv.create(place, symlinks=True)
        packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(place)}))
        for found in required(metadata_of(wheel).get_all("Requires-Dist", []), {extra}):
            tops = {Path(str(file)).parts[0] for file in found.files or ()}
            for top in tops - {"..", "__pycache__"}:
                link = packages / top
                if not link.exists():
                    link.symlink_to(Path(str(found.locate_file(top))).resolve())
        pip = (sys.executable, "-m", "pip", "--python", place / "bin" / "python")
        wanted = ("install", "--quiet", "--no-index", "--no-deps", "--no-compile", wheel)
        run(*pip, *wanted, cwd=place)
        run(*pip, "check", cwd=place)
        made[extra] = place / "bin"
        return made[extra]

    return environment_with


def test_wheel_holds_the_whole_package_and_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    fields = metadata_of(wheel)
    ours = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "shardmark").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert ours - names == set()
    examples = {f"shardmark/examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
    assert examples
    assert examples <= names
    assert [name for name in names if "tests" in name or "benchmarks" in name] == []
    assert (fields["Name"], fields["Version"]) == ("shardmark", shardmark.__version__)
    assert fields["License-Expression"] == "Apache-2.0"
    assert "torch>=2.11" in fields.get_all("Requires-Dist", [])
    assert "# Shardmark" in fields.get_payload()


LOOK = """
import importlib.util, shardmark
print(shardmark.__file__, shardmark.__version__, importlib.util.find_spec("torchvision"))
"""


def test_base_installation_has_a_command_that_works(
    environments: Environments, tmp_path: Path
) -> None:
    programs = environments("")
    place, version, vision = run(programs / "python", "-c", LOOK, cwd=tmp_path).split()
    assert Path(place).is_relative_to(programs.parent)
    assert (version, vision) == (shardmark.__version__, "None")
    command = programs / "shardmark"
    assert "quickstart" in run(command, "list", "experiments", cwd=tmp_path)
    run(command, "init", "--task", "tokens", cwd=tmp_path)
    assert (tmp_path / "my_task.py").is_file()
    predicted = run(command, "plan", "experiment.yaml", "--on", "4xa10g", cwd=tmp_path)
    assert "samples/s" in predicted


def test_installation_with_all_extras_plans_the_model_of_the_first_page(
    environments: Environments, tmp_path: Path
) -> None:
    command = environments("all") / "shardmark"
    predicted = run(command, "plan", "resnet50", "--on", "4xa10g", cwd=tmp_path)
    assert "samples/s" in predicted
    assert "ddp" in predicted


def test_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "license"} <= cited.keys()
    assert cited["version"] == shardmark.__version__
    assert all(author["name"] for author in cited["authors"])


INSTRUCTIONS = {"FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "USER", "ENTRYPOINT", "CMD"}


@pytest.mark.parametrize(
    ("name", "base"), [("Dockerfile", "python:"), ("Dockerfile.cuda", "nvidia/cuda:")]
)
def test_image_is_made_of_files_that_are_there(name: str, base: str) -> None:
    """Read, not built: each instruction is one, and what is copied is let through."""
    text = (ROOT / name).read_text(encoding="utf-8")
    code = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in code.splitlines() if line.strip()]
    assert {step[0] for step in steps} <= INSTRUCTIONS
    (image,) = [rest for word, rest in steps if word == "FROM"]
    assert image.startswith(base)
    runtime = re.search(
        r"^nvidia-cuda-runtime==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.M
    )
    assert runtime is not None
    cuda = re.search(r"^ARG CUDA=(\d+\.\d+)", text, re.M)
    assert (cuda[1] if cuda else None) == (runtime[1] if "cuda" in name else None)
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [one for word, rest in steps if word == "COPY" for one in rest.split()[:-1]]
    assert {"pyproject.toml", "src"} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists()
        assert f"!{source}" in allowed
    assert steps[-2:] == [["ENTRYPOINT", '["shardmark"]'], ["CMD", '["--help"]']]
