"""The winner as a launch command and configuration, read back as its launchers would read it."""

from __future__ import annotations

import json
import shlex
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from shardmark.base.cells import cell_id
from shardmark.base.results.verification import REFERENCE, Verification, write_verification
from shardmark.cli import BAD_INPUT, main
from shardmark.experiment.load import load_experiment
from shardmark.experiment.matrix import expand
from shardmark.ranks.strategies.deepspeed.strategy import Zero
from shardmark.ranks.trial import Trial
from tests import ROOT
from tests.golden.invented import invented_trial, invented_verdict, write_run

STRATEGIES = "[single, ddp, fsdp, {name: fsdp-hybrid, shard_group: 2}, zero-3, ps-async]"
CLUSTER_KEYS = {
    *("compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug"),
    *("num_processes", "machine_rank", "num_machines", "main_training_function", "rdzv_backend"),
    *("fsdp_config", "deepspeed_config", "parallelism_config"),
}
"""Keys of accelerate's `ClusterConfig`, which refuses any other."""
OF_ONE_MACHINE = ("CUDA_HOME", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA",
                  "NCCL_TOPO_FILE", "OMP_PROC_BIND", "OPENBLAS_NUM_THREADS")  # fmt: skip


@cache
def planned(
    *overrides: str,
    device: Literal["cuda", "cpu"] = "cuda",
    ranks: int = 4,
    strategies: str = STRATEGIES,
) -> dict[str, Trial]:
    """Strategy -> trial, on so many ranks, in the order of the strategies."""
    given = [f"matrix.strategy={strategies}", f"matrix.world_size=[1, {ranks}]", *overrides]
    trials = expand(load_experiment("quickstart", given), device).trials
    made = {
        t.strategy.name: t for t in trials if t.world_size == ranks or t.strategy.name == "single"
    }
    return {name: made[name] for name in sorted(made, key=strategies.index)}


def stored(folder: Path, trials: dict[str, Trial], verified: tuple[str, ...] = ()) -> str:
    """A run of them, each faster than the one before; those names are verified."""
    results = [
        invented_trial(
            trial.strategy.name,
            trial.world_size,
            metrics={"samples_per_second": 100.0 + number},
            id=trial.id,
            trial=trial.model_dump(mode="json"),
            layout=trial.layout,
            strategy_options=trial.strategy.options,
            precision=trial.recipe.precision,
        )
        for number, trial in enumerate(trials.values())
    ]
    variables = {
        "NCCL_ALGO": "Ring; touch hacked",
        "x; touch hacked": "1",
        "TORCH_HOME": "***",
        **dict.fromkeys(("LD_PRELOAD", "PATH", "PYTHONPATH", "HF_ENDPOINT"), "planted"),
        **dict.fromkeys(("NCCL_NET_PLUGIN", "NCCL_SECRET_KEY"), "planted"),
        "MALLOC_TRIM_THRESHOLD_": "-1",
        **dict.fromkeys(OF_ONE_MACHINE, "here"),
    }
    write_run(folder, results, environment={"variables": variables})
    verdicts = tuple(
        invented_verdict(
            name,
            trial.world_size,
            id=cell_id(trial.model_dump(mode="json")),
            strategy_options=trial.strategy.options,
            precision=trial.recipe.precision,
        )
        for name, trial in trials.items()
        if name in verified
    )
    write_verification(folder, Verification(reference=REFERENCE, steps=3, verdicts=verdicts))
    return str(folder)


def exported(tmp_path: Path, to: str, strategy: str, *overrides: str) -> dict[str, Any]:
    """File name -> content."""
    trial = planned(*overrides)[strategy]
    run = stored(tmp_path / "run", {strategy: trial})
    out = tmp_path / "out"
    arguments = ["export", run, "--to", to, "--trial", trial.id, "--out", str(out)]
    assert main(arguments) == 0
    readers: dict[str, Any] = {".json": json.loads, ".yaml": yaml.safe_load}
    return {path.name: readers.get(path.suffix, str)(path.read_text()) for path in out.iterdir()}


AUTOCAST = "matrix.strategy=[{name: fsdp, mixed_precision: autocast}]"


@pytest.mark.parametrize(
    ("strategy", "overrides", "expected"),
    [
        (
            "ddp",
            ["recipe.precision=bf16"],
            {"distributed_type": "MULTI_GPU", "num_processes": 4, "mixed_precision": "bf16"},
        ),
        (
            "fsdp",
            ["recipe.precision=bf16", "recipe.activation_checkpointing=true", AUTOCAST],
            {
                "distributed_type": "FSDP",
                "mixed_precision": "no",  # autocast was measured, and Accelerate would cast
                "fsdp_config": {
                    "fsdp_version": 2,
                    "fsdp_reshard_after_forward": True,
                    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                    "fsdp_offload_params": False,
                    "fsdp_activation_checkpointing": True,
                    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
                },
            },
        ),
        ("fsdp", ["recipe.precision=bf16"], {"mixed_precision": "bf16"}),
        ("fsdp", ["recipe.weights=bf16"], {"mixed_precision": "no"}),
        (
            "fsdp-hybrid",
            [],
            {
                "parallelism_config": {
                    "parallelism_config_dp_replicate_size": 2,
                    "parallelism_config_dp_shard_size": 2,
                }
            },
        ),
    ],
)
def test_accelerate_gets_a_configuration_file(
    tmp_path: Path, strategy: str, overrides: list[str], expected: dict[str, Any]
) -> None:
    files = exported(tmp_path, "accelerate", strategy, *overrides)
    assert set(files) == {"launch.sh", "settings.json", "accelerate.yaml"}
    content = files["accelerate.yaml"]
    assert expected.items() <= content.items()
    assert content.keys() <= CLUSTER_KEYS
    assert '--config_file "$folder/accelerate.yaml" "$@"' in files["launch.sh"]


def test_bf16_weights_are_cast_by_the_users_code(tmp_path: Path) -> None:
    files = exported(tmp_path, "torchrun", "fsdp", "recipe.weights=bf16")
    assert "cast the parameters of your model" in files["launch.sh"]
    settings = files["settings.json"]
    assert (settings["precision"], settings["weights"]) == ("bf16", "bf16")
    assert settings["arguments"]["mp_policy"] == {"param_dtype": None, "reduce_dtype": "bf16"}


def test_accelerate_recomputes_every_block(tmp_path: Path) -> None:
    files = exported(tmp_path, "accelerate", "fsdp", "recipe.activation_checkpointing=selective")
    assert files["accelerate.yaml"]["fsdp_config"]["fsdp_activation_checkpointing"] is True
    assert "measured was activation_checkpointing: selective" in files["launch.sh"]


def test_accelerate_takes_deepspeed_s_own_file(tmp_path: Path) -> None:
    files = exported(tmp_path, "accelerate", "zero-3", "recipe.precision=bf16")
    content = files["accelerate.yaml"]
    assert content["distributed_type"] == "DEEPSPEED"
    assert content["deepspeed_config"] == {
        "zero3_init_flag": False,
        "deepspeed_config_file": str(tmp_path / "out" / "deepspeed.json"),
    }
    assert "mixed_precision" not in content, "the file has it, and Accelerate refuses both"
    assert files["deepspeed.json"]["zero_optimization"]["stage"] == 3


def test_deepspeed_is_the_strategy_s_own_configuration(tmp_path: Path) -> None:
    trial = planned("recipe.gradient_accumulation=2")["zero-3"]
    run = stored(tmp_path / "run", {"zero-3": trial}, verified=("zero-3",))
    assert main(["export", run, "--to", "deepspeed", "--out", str(tmp_path / "out")]) == 0
    content = json.loads((tmp_path / "out" / "deepspeed.json").read_text())
    strategy = trial.built_strategy
    assert isinstance(strategy, Zero)
    own = strategy.config(trial.recipe, "cuda")
    assert content == own | {"train_micro_batch_size_per_gpu": 16}, "128 / 4 ranks / 2"
    script = (tmp_path / "out" / "launch.sh").read_text()
    assert "torchrun --nproc-per-node 4 --standalone" in script
    assert '--deepspeed_config "$folder/deepspeed.json"' in script


def test_torchrun_starts_the_user_s_script_as_it_was_measured(tmp_path: Path) -> None:
    files = exported(tmp_path, "torchrun", "ddp")
    assert set(files) == {"launch.sh", "loop.py", "settings.json", "wrap.py", "wrap_blocks.py"}
    assert files["loop.py"] == (ROOT / "examples/ddp.py").read_text()
    assert "shardmark" not in "".join(
        line for line in files["wrap.py"].splitlines() if "import" in line
    )
    settings = files["settings.json"]
    assert settings["wrapper"] == "torch.nn.parallel.DistributedDataParallel"
    assert settings["arguments"]["bucket_cap_mb"] == 25
    assert (settings["global_batch"], settings["micro_batch"]) == (128, 32)
    assert settings["optimizer"]["lr"] == 0.001
    script = files["launch.sh"].splitlines()
    assert script[-1] == 'exec torchrun --nproc-per-node 4 --standalone "$@"'
    exports = [shlex.split(line)[1:] for line in script if line.startswith("export ")]
    assert exports[1:] == [
        ["NCCL_ALGO=Ring; touch hacked"],  # it is text
        ["MALLOC_TRIM_THRESHOLD_=-1"],
        ["OMP_NUM_THREADS=2"],
    ]
    assert "glibc keeps freed memory" in files["launch.sh"]
    assert "Accelerate" not in files["launch.sh"], "notes are the target's alone"
    overrides = ("matrix.world_size=[4]", "placement.nodes=2")
    several = exported(tmp_path / "several", "torchrun", "ddp", *overrides)["launch.sh"]
    assert "--nproc-per-node 2 --nnodes 2" in several
    assert '"$MASTER:29500"' in several


def test_the_fastest_verified_trial_is_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = planned()
    run = stored(tmp_path / "run", trials, verified=("single", "ddp"))
    command = ["export", run, "--to", "torchrun", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    assert "train.py" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "settings.json").read_text())["strategy"] == "ddp"
    none = stored(tmp_path / "none", trials)
    assert main(["export", none, "--to", "torchrun"]) == BAD_INPUT
    assert "--trial NAME" in capsys.readouterr().err


def test_a_strategy_names_its_trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fewer, more = planned(ranks=2)["fsdp"], planned(ranks=4)["fsdp"]
    again = fewer.model_copy(update={"repeat": 1, "id": f"{fewer.id}-again"})
    run = stored(tmp_path / "run", {"fsdp": fewer, "more": more, "again": again})
    command = ["export", run, "--to", "torchrun", "--out", str(tmp_path / "out"), "--trial"]
    assert main([*command, "fsdp"]) == BAD_INPUT
    said = capsys.readouterr().err
    assert "has 2 different trials of 'fsdp'" in said
    assert f"fsdp on 2 ranks ({fewer.id}), fsdp on 4 ranks ({more.id})" in said
    assert main([*command, "fsdp on 2 ranks"]) == 0
    assert main([*command, fewer.id]) == 0, "the same files"
    capsys.readouterr()
    assert main([*command, "fsdp on 4 ranks"]) == BAD_INPUT
    assert "exists with other content; name another folder by --out" in capsys.readouterr().err
    assert fewer.id in (tmp_path / "out" / "launch.sh").read_text()


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("cpu") / "run", planned(device="cpu"))


@pytest.mark.parametrize(
    ("to", "strategy", "said"),
    [
        (
            "deepspeed",
            "ddp",
            "DeepSpeed has no ddp on a CPU; use --to torchrun or --to accelerate",
        ),
        ("accelerate", "fsdp", "Accelerate has no fsdp on a CPU; use --to torchrun"),
        ("accelerate", "zero-3", "on a CPU; use --to torchrun or --to deepspeed"),
        ("accelerate", "ps-async", "ps-async runs only in Shardmark's processes"),
        ("torchrun", "ps-async", "ps-async runs only in Shardmark's processes"),
        ("torchrun", "none", "has no 'none'; it has single on 1 rank (single-w1"),
        ("csv", "ddp", "--trial: is for torchrun, accelerate, deepspeed"),
    ],
)
def test_strategies_without_a_launcher_form_are_refused(
    *,
    on_cpu: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    to: str,
    strategy: str,
    said: str,
) -> None:
    trials = planned(device="cpu")
    name = trials[strategy].id if strategy in trials else strategy
    out = tmp_path / "out"
    assert main(["export", on_cpu, "--to", to, "--trial", name, "--out", str(out)]) == BAD_INPUT
    assert said in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("compress", "hook", "note"),
    [
        ("bf16", {"comm_hook": "bf16"}, "default_hooks.bf16_compress_hook"),
        ("powersgd", {"comm_hook": "power_sgd"}, "PowerSGDState(None, matrix_approximation_rank=1"),
    ],
)
def test_compression_has_a_note(
    tmp_path: Path, compress: str, hook: dict[str, str], note: str
) -> None:
    """The note is for Accelerate's DistributedDataParallelKwargs, and a call of torch's."""
    strategy = f"matrix.strategy=[{{name: ddp, compress: {compress}}}]"
    files = exported(tmp_path, "accelerate", "ddp", strategy)
    assert hook.items() <= files["settings.json"]["arguments"].items()
    assert note in files["launch.sh"]
