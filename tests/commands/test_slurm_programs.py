"""SLURM's programs as they are called: small scripts stand in for `sbatch` and `srun`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmark.config.engines import SlurmOptions
from shardmark.core.errors import InputError, ShardmarkError
from shardmark.launch.engine import RemoteCommand
from shardmark.launch.nodes.registry import NodeRegistry
from shardmark.launch.slurm import engine as slurm
from shardmark.launch.slurm.engine import OTHER_TASKS, Steps
from tests.unit.launch.nodes import KEY, listening
from tests.unit.launch.test_slurm import command, do, inside

__all__ = ["command", "inside"]  # fixtures


def program(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program of that name on the path; it writes its words down."""
    path = folder / name
    path.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {folder}/words\nenv > {folder}/env\n{text}\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_what_keeps_a_job_from_being_submitted(
    command: RemoteCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "submitit", None)
        with pytest.raises(InputError, match=r"submitit is not installed; pip install 'shardmark"):
            do(command)
    pytest.importorskip("submitit")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        with pytest.raises(InputError, match="slurm, and there is no sbatch here"):
            do(command)
    for name in ("sbatch", "srun"):
        program(tmp_path, name, "echo 'sbatch: error: bad partition' >&2; exit 1", monkeypatch)
    with pytest.raises(InputError, match="sbatch refuses the job: error: bad partition"):
        do(command)


def test_shell_of_salloc_goes_to_the_first_node(
    command: RemoteCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program(tmp_path, "srun", "exit 1", monkeypatch)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    assert do(command) == 1
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:4] == ["--overlap", "--nodes=1", "--ntasks=1", "--relative=0"]
    assert words[words.index("-m") :][:3] == ["-m", "shardmark", "run"]


@pytest.fixture
def registry() -> Iterator[NodeRegistry]:
    with listening(1, 5) as made:
        yield made


@pytest.mark.usefixtures("inside")
def test_step_that_cannot_start_says_why(
    registry: NodeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in OTHER_TASKS:
        monkeypatch.setenv(name, "4")
    program(tmp_path, "srun", "echo 'srun: error: no such node' >&2; exit 3", monkeypatch)
    steps = Steps(SlurmOptions(), KEY, "7")
    steps.start(registry, "t")
    with pytest.raises(ShardmarkError, match=r"step .* ended with code 3: .* no such node"):
        registry.wait(20, steps.check, lambda _: None)
    steps.close()
    assert f'"port": {registry.port}' in (tmp_path / "words").read_text()
    left = (tmp_path / "env").read_text()
    assert not any(f"{name}=" in left for name in OTHER_TASKS), "tasks would get parts of the node"
    assert "SLURM_JOB_ID=7" in left
    assert f"SHARDMARK_SECRET={steps.secret}" in left
    assert steps.secret not in (tmp_path / "words").read_text(), "everybody can read those"


@pytest.mark.usefixtures("inside")
def test_step_that_does_not_end_is_ended(
    registry: NodeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told to, and killed in the end."""
    monkeypatch.setattr(slurm, "END_SECONDS", 0.1)
    program(tmp_path, "srun", 'trap "" TERM; while :; do sleep 0.1; done', monkeypatch)
    steps = Steps(SlurmOptions(), KEY, "7")
    steps.start(registry, "t")
    steps.check()
    steps.close()
    steps.close()
