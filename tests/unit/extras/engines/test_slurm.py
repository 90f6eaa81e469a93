"""The engine `slurm`: its options, and the steps of an allocation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from shardmark.base.errors import InputError
from shardmark.bench.launch.engines import submission
from shardmark.experiment.engines import SlurmOptions
from shardmark.experiment.load import load_experiment
from shardmark.experiment.matrix import expand
from shardmark.extras.engines.slurm import engine as slurm
from shardmark.extras.engines.slurm.engine import Steps, own_name, step_words
from tests.unit.bench.launch.fakes import experiment
from tests.unit.extras.engines.nodes import KEY, request

TWO = ("placement.nodes=2", "matrix.strategy=[ddp]")
TRIALS = expand(experiment(*TWO), "cpu").trials
REQUEST = request(TRIALS)
INSIDE = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURMD_NODENAME": "localhost",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
}


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the first node of an allocation of two."""
    for name, value in INSIDE.items():
        monkeypatch.setenv(name, value)


def test_options_of_a_job_name_the_job_script() -> None:
    with pytest.raises(InputError, match=r"found partition, time; .* `shardmark init --sbatch`"):
        load_experiment(
            "quickstart", ["engine.name=slurm", "engine.time=60", "engine.partition=gpu"]
        )
    with pytest.raises(ValidationError, match="'trial' or 'run'"):
        SlurmOptions.model_validate({"step": "rank"})


def test_dry_run_shows_the_command_and_a_step_without_slurm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    made = experiment(*TWO, "engine.name=slurm")
    command, step = submission(made, expand(made), ["shardmark", "run"])
    assert command == "in an allocation of at least 2 nodes: shardmark run"
    assert step.startswith("each trial: srun --job-name=TRIAL --nodes=2 --ntasks=2 ")


@pytest.mark.usefixtures("inside")
def test_other_tasks_of_a_step_leave_the_run_to_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`srun shardmark run ...` in a script starts the command on every node."""
    messages: list[str] = []
    in_step = request(TRIALS, messages.append)
    assert slurm.serve_as_node(SlurmOptions(), in_step) is None
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert slurm.serve_as_node(SlurmOptions(), in_step) == 0
    assert "nothing to do" in messages[0]


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"SLURM_JOB_ID": None}, "engine.name: slurm, outside an allocation"),
        ({"SLURM_JOB_NUM_NODES": "1"}, "the allocation has 1, and the experiment takes 2 nodes"),
        ({"SLURM_NODEID": "1"}, "this is not the allocation's first node"),
        ({"SLURMD_NODENAME": None}, "srun --overlap --nodes=1 --ntasks=1 --relative=0"),
    ],
)
def test_run_cannot_be_controlled_outside_the_first_node(
    changes: dict[str, str | None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in changes.items():
        monkeypatch.delenv(name)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=said):
        slurm.build(SlurmOptions(), REQUEST)


@pytest.mark.usefixtures("inside")
def test_name_of_the_first_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_name(SlurmOptions()) == "localhost"
    assert own_name(SlurmOptions(host="ib0.node1")) == "ib0.node1"
    monkeypatch.setenv("SLURMD_NODENAME", "nowhere.invalid")
    monkeypatch.setattr("platform.node", lambda: "none.invalid")
    with pytest.raises(InputError, match=r"engine\.host: missing, and nowhere\.invalid and none"):
        own_name(SlurmOptions())


def test_command_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    image = "nvcr.io#nvidia/pytorch:26.09-py3"
    options = SlurmOptions(
        gpus_per_node=4, srun=("--mpi=none",), container=image, container_mounts=("/d:/d",)
    )
    words = step_words(options, 2, KEY, title="t", host="node1", port=9)
    assert words[:4] == ["srun", "--job-name=t", "--nodes=2", "--ntasks=2"]
    assert {
        *("--ntasks-per-node=1", "--overlap", "--gpus-per-node=4", "--mpi=none"),
        f"--container-image={image}",
        f"--container-mounts={tmp_path}:{tmp_path},/d:/d",
        f"--container-workdir={tmp_path}",
    } <= {*words}
    *start, join_options = words[words.index("-P") - 1 :]
    assert start == ["python3", "-P", "-m", "shardmark.extras.engines.nodes.node"]
    told = {"host": "node1", "port": 9, "number_variable": "SLURM_PROCID", "with_files": True}
    assert told.items() <= json.loads(join_options).items()
    wrapped = SlurmOptions(python="apptainer exec --nv image.sif python")
    words = step_words(wrapped, 1, {}, title="t", host="h", port=9)
    assert " apptainer exec --nv image.sif python -P -m " in " ".join(words)


@pytest.mark.parametrize("state", ["RUNNING", "CANCELLED", None])
def test_end_of_a_job_is_detected(state: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that does not answer says nothing against the ranks' failing by themselves."""
    monkeypatch.setattr(slurm, "NOTICE_SECONDS", 0.01)
    monkeypatch.setattr(slurm, "job_state", lambda _: state)
    assert Steps(SlurmOptions(), KEY, "7").is_ending() == (state == "CANCELLED")
