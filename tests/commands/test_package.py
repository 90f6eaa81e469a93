"""What would be published: a wheel that works where it is installed, and files beside it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml

import shardmark

ROOT = Path(__file__).parents[2]
BUILD = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"


def run(*command: str, cwd: Path, **variables: str) -> str:
    ended = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


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


def test_wheel_holds_the_whole_package_and_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        fields = message_from_bytes(archive.read(metadata))
    ours = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "shardmark").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert ours - names == set()
    assert [name for name in names if "tests" in name or "benchmarks" in name] == []
    assert (fields["Name"], fields["Version"]) == ("shardmark", shardmark.__version__)
    assert fields["License-Expression"] == "Apache-2.0"
    assert "torch>=2.11" in fields.get_all("Requires-Dist", [])
    assert "# Shardmark" in fields.get_payload()


def test_installed_wheel_has_a_command_that_works(wheel: Path, tmp_path: Path) -> None:
    """In a folder of its own, before this checkout on the path."""
    place = tmp_path / "place"
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile")
    run(sys.executable, *pip, "--target", str(place), str(wheel), cwd=tmp_path)
    where = run(
        *(sys.executable, "-c", "import shardmark; print(shardmark.__file__)"),
        cwd=tmp_path,
        PYTHONPATH=str(place),
    )
    assert Path(where.strip()).is_relative_to(place)
    command = str(place / "bin" / "shardmark")
    listed = run(command, "list", "experiments", cwd=tmp_path, PYTHONPATH=str(place))
    assert "quickstart" in listed
    schema = run(command, "schema", cwd=tmp_path, PYTHONPATH=str(place))
    assert schema.startswith("{")


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
