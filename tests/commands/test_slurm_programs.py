"""SLURM's programs as they are called: small scripts stand in for `srun` and `scontrol`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmark.base.errors import ShardmarkError
from shardmark.experiment.engines import SlurmOptions
from shardmark.extras.engines.nodes.registry import NodeRegistry
from shardmark.extras.engines.slurm import engine as slurm
from shardmark.extras.engines.slurm.engine import OTHER_TASKS, Steps, job_state
from tests.unit.extras.engines.nodes import KEY, listening
from tests.unit.extras.engines.test_slurm import inside

__all__ = ["inside"]  # fixture


def program(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program of that name on the path; it writes its words down."""
    path = folder / name
    path.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {folder}/words\nenv > {folder}/env\n{text}\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


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


def test_state_is_what_scontrol_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "scontrol", "echo JobId=3 JobState=RUNNING Requeue=1", monkeypatch)
    assert job_state("3") == "RUNNING"
    assert (tmp_path / "words").read_text().split() == ["show", "job", "--oneliner", "3"]
    program(tmp_path, "scontrol", "exit 1", monkeypatch)
    assert job_state("3") is None
