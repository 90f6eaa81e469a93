"""A trial as a launch command and the configuration that the user's own code can take."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import ceil
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardmark.base.cells import cell_id, ranks_and_nodes
from shardmark.base.errors import InputError
from shardmark.base.files.strict_yaml import format_yaml
from shardmark.base.masking import MASK
from shardmark.base.results.files import changed_files, write_files
from shardmark.base.results.schema import Outcome, TrialResult
from shardmark.base.results.store import RunFolder, StoredRun
from shardmark.base.system.environment_variables import ALLOCATOR
from shardmark.base.text import one_line, render_json, with_options
from shardmark.base.version import __version__
from shardmark.bench.analysis.advise.groups import groups_of
from shardmark.bench.analysis.advise.selection import select
from shardmark.bench.analysis.compare.comparison import compare
from shardmark.bench.analysis.compare.rows import Row
from shardmark.bench.analysis.compare.verdicts import METRIC
from shardmark.bench.report.export.examples import example_text
from shardmark.bench.report.export.launch_configuration import (
    LaunchConfiguration,
    launch_configuration,
)
from shardmark.ranks.measure.system.environment import is_stored
from shardmark.ranks.trial import Trial

SCRIPT, SETTINGS = "launch.sh", "settings.json"
ACCELERATE, DEEPSPEED = "accelerate.yaml", "deepspeed.json"
WRAP, BLOCKS, LOOP = "wrap.py", "wrap_blocks.py", "loop.py"
LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
RECIPE = ("optimizer", "schedule", "precision", "weights", "gradient_accumulation",
          "gradient_clipping", "sync_batch_norm", "activation_checkpointing", "cpu_offload",
          "compile", "channels_last", "tf32", "seed")  # fmt: skip
"""Fields of the recipe that the user's own code has to set."""
MACHINE_VARIABLES = re.compile(
    r"(CUDA_(CACHE|DEVICE_ORDER|HOME|PATH|VISIBLE)|DS_|GLOO_|GOMP_|MKL_|NVIDIA_VISIBLE|OMP_|OPENBLAS_"
    r"|TORCH_CUDA_ARCH|TORCHINDUCTOR_)\w*|\w+_(AFFINITY|DIR|FILE|HCA|HOSTID|IFNAME|PATH|PLUGIN)"
)
"""Variables that describe the machine of the run: its devices, threads, interfaces and folders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedTrial:
    """The trial that is exported, as it was run."""

    result: TrialResult
    trial: Trial
    configuration: LaunchConfiguration
    notes: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables that steered threads, memory or communication."""

    @property
    def micro_batch(self) -> int:
        """Return the largest number of samples that a rank has in one forward pass."""
        parts = self.trial.layout.shares * self.trial.recipe.gradient_accumulation
        return ceil(self.trial.batch_per_step / parts)


def export_launch(
    runs: Sequence[StoredRun], to: str, trial_id: str | None = None, out: str | None = None
) -> list[str]:
    """Write `launch.sh`, `settings.json`, `loop.py` and the launcher's own file into `out`.

    Without an id the fastest verified trial is taken.  Returns lines that say what was written, and
    how it is started.  Raises `InputError` for several runs, for a trial that did not end ok, for a
    strategy that the launcher does not have, and for files that it would replace.
    """
    if len(runs) != 1:
        raise InputError(f"--to {to}", f"{len(runs)} runs are named", "name one")
    run = runs[0]
    result = _trial_of(run, trial_id) if trial_id is not None else _fastest_verified(run)
    exported = _exported_trial(run, result, to)
    folder = Path(out or f"exports/{to}").expanduser()
    contents = {SETTINGS: render_json(_settings(to, exported))}
    if to != "torchrun":
        contents |= _files_of(to, exported, folder)
    elif exported.configuration.importable:
        contents |= _wrapping_modules()
    if to != "accelerate" and exported.configuration.example is not None:
        contents[LOOP] = example_text(exported.configuration.example)
    contents[SCRIPT] = _script(to, exported, run)
    encoded = {folder / name: content.encode() for name, content in contents.items()}
    for path in changed_files(encoded):
        raise InputError(str(path), "exists with other content", "name another folder by --out")
    write_files(encoded)
    return [
        f"{to}: {exported.trial.title} to {folder}",
        *exported.notes,
        f"start: sh {shlex.quote(str(folder / SCRIPT))} train.py",
    ]


def _trial_of(run: StoredRun, name: str) -> TrialResult:
    """Return the first ok trial with this id or title, such as `fsdp` or `fsdp on 4 ranks`."""
    named = [result for result in run.trials if name in (result.id, *_titles(result))]
    ended = {cell_id(r.trial): r for r in reversed(named) if r.outcome is Outcome.OK}
    if len(ended) == 1:
        return ended.popitem()[1]
    if named and not ended:
        reason = f"{name} ended as {named[0].outcome}"
        raise InputError("--trial", reason, "name one that ended ok")
    ok = {cell_id(r.trial): r for r in reversed(run.trials) if r.outcome is Outcome.OK}
    trial_names = [f"{_titles(r)[-1]} ({r.id})" for r in reversed((ended or ok).values())]
    shown = ", ".join(
        [*trial_names[:5], *([f"{len(trial_names) - 5} more"] if len(trial_names) > 5 else [])]
    )
    problem = f"{len(ended)} different trials of {name!r}" if ended else f"no {name!r}"
    raise InputError("--trial", f"{run.path} has {problem}", f"it has {shown or 'none'}")


def _titles(result: TrialResult) -> tuple[str, str]:
    """Return `fsdp`, and the form `fsdp-hybrid (shard_group=2) on 4 ranks`."""
    label = with_options(result.strategy, result.strategy_options)
    ranks = ranks_and_nodes(result.world_size, result.trial.get("nodes", 1))
    return result.strategy, f"{label} on {ranks}"


def _fastest_verified(run: StoredRun) -> TrialResult:
    best: list[Row] = []
    for group in groups_of(compare([run]).rows):
        verified = [row for row in group.candidates if row.equivalent is True and row.ok_trials]
        if (ranking := select(verified, METRIC)) is not None:
            best.append(ranking.row)
    if not best:
        raise InputError(
            str(run.path),
            "no trial with a finite loss is verified to train what the reference trains",
            "name the one to export: --trial NAME",
        )
    if len(best) > 1:
        ids = ", ".join(row.ok_trials[0].id for row in best)
        reason = f"it has {len(best)} tasks or recipes, and a fastest trial of each"
        raise InputError(str(run.path), reason, f"name one: --trial; the fastest are {ids}")
    if best[0].disturbed:
        reason = f"no trial is known to be the fastest: {best[0].disturbed}"
        raise InputError(str(run.path), reason, "name the one to export: --trial NAME")
    return best[0].ok_trials[0]


def _exported_trial(run: StoredRun, result: TrialResult, to: str) -> ExportedTrial:
    try:
        trial = Trial.model_validate(result.trial)
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"its {'.'.join(map(str, first['loc']))} cannot be read: {first['msg']}"
        raise InputError(f"trial {result.id}", reason, "name another: --trial NAME") from None
    if trial.script is not None:
        script = trial.script.command.removeprefix("python ")
        raise InputError(
            f"trial {result.id}",
            "it is a script, which needs no configuration",
            f"its command: torchrun --nproc-per-node {trial.world_size // trial.nodes} {script}",
        )
    configuration = launch_configuration(
        trial.built_strategy, trial.recipe, trial.layout, trial.device_type
    )
    if configuration is None:
        raise InputError(
            f"trial {result.id}",
            f"{trial.strategy.name} runs only in Shardmark's processes",
            "name a trial of another strategy: --trial NAME",
        )
    stored = RunFolder(run.path).read_environment().get("variables")
    stored = stored if isinstance(stored, dict) else {}
    environment = {
        name: str(value)
        for name, value in stored.items()
        # Others are not ours: a run of another person must not set LD_PRELOAD or PATH.
        if is_stored(name) and MASK not in str(value) and not MACHINE_VARIABLES.fullmatch(name)
    }
    threads = max(rank.threads for rank in result.ranks)
    environment["OMP_NUM_THREADS"] = str(threads)
    notes = configuration.notes
    if to == "accelerate":
        notes += configuration.accelerate_notes
    elif to == "torchrun" and configuration.importable:
        notes += (f"`from wrap import wrap` wraps your model as it was measured: {WRAP}.",)
    return ExportedTrial(
        result=result,
        trial=trial,
        configuration=configuration,
        notes=notes,
        environment=environment,
    )


def _wrapping_modules() -> dict[str, str]:
    """Return file name -> code of the modules that wrap a model and find its blocks."""
    sources = files("shardmark.ranks.strategies")
    code = (sources / "wrap.py").read_text()
    return {
        WRAP: code.replace("shardmark.ranks.strategies.blocks", BLOCKS.removesuffix(".py")),
        BLOCKS: (sources / "blocks.py").read_text(),
    }


def _settings(to: str, exported: ExportedTrial) -> dict[str, Any]:
    trial, configuration = exported.trial, exported.configuration
    recipe = trial.recipe.model_dump(mode="json")
    renamed = configuration.accelerate_arguments if to == "accelerate" else {}
    return {
        "strategy": trial.strategy.name,
        "options": trial.strategy.options,
        "processes": trial.layout.processes,
        "nodes": trial.nodes,
        "device": trial.device_type,
        "wrapper": configuration.wrapper,
        "arguments": dict(renamed or configuration.arguments),
        "global_batch": trial.batch_per_step,
        "micro_batch": exported.micro_batch,
        **{key: recipe[key] for key in RECIPE},
        "notes": list(exported.notes),
    }


def _files_of(to: str, exported: ExportedTrial, folder: Path) -> dict[str, str]:
    """Return file name -> content of the files that the launcher or its library reads."""
    configuration, name = exported.configuration, exported.trial.strategy.name
    forms = {"accelerate": configuration.accelerate, "deepspeed": configuration.deepspeed}
    if forms[to] is None:
        others = ["torchrun", *(key for key, form in forms.items() if form is not None)]
        title = {"accelerate": "Accelerate", "deepspeed": "DeepSpeed"}[to]
        reason = f"{title} has no {name}{' on a CPU' * (exported.trial.device_type == 'cpu')}"
        instead = f"use --to {' or --to '.join(others)}, or --trial to select another strategy"
        raise InputError(f"--to {to}", reason, instead)
    files = {}
    if configuration.deepspeed is not None:
        batch = {"train_micro_batch_size_per_gpu": exported.micro_batch}
        files[DEEPSPEED] = render_json(dict(configuration.deepspeed) | batch)
    if to == "accelerate":
        files[ACCELERATE] = format_yaml(_accelerate(exported, folder))
    return files


def _accelerate(exported: ExportedTrial, folder: Path) -> dict[str, Any]:
    trial, launcher_options = exported.trial, dict(exported.configuration.accelerate or {})
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": trial.nodes,
        "num_processes": trial.layout.processes,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static" if trial.nodes == 1 else "c10d",
        "use_cpu": trial.device_type == "cpu",
        "debug": False,
    }
    if exported.configuration.deepspeed is not None:
        # Accelerate refuses keys that are also in DeepSpeed's file, such as the precision.
        file = str((folder / DEEPSPEED).resolve())
        launcher_options["deepspeed_config"] |= {"deepspeed_config_file": file}
        return content | launcher_options
    precision, weights = trial.recipe.precision, trial.recipe.weights
    mixed = "no" if precision == weights else precision
    return content | {"mixed_precision": mixed} | launcher_options


def _script(to: str, exported: ExportedTrial, run: StoredRun) -> str:
    nodes = exported.trial.layout.ranks_by_node
    lines = [
        "#!/bin/sh",
        f"# {exported.trial.title}, as measured in trial {exported.result.id} of {run.path.name}.",
        f"# Written by shardmark {__version__}.  Usage: sh {SCRIPT} train.py [ARGUMENT...]",
        *(f"# {note}" for note in exported.notes),
    ]
    if len(nodes) > 1:
        both = to == "accelerate"
        also = ", and NODE to its own number, from 0" if both else ""
        lines.append(f"# Run it on every node, with MASTER set to the first one's address{also}.")
        lines += [f': "${{{name}:?is not set}}"' for name in ("MASTER", "NODE")[: 1 + both]]
    environment = dict(exported.environment)
    if exported.trial.device_type == "cpu":
        lines.append("# It was measured on a CPU.")
        if to == "accelerate":
            # Accelerate's launcher passes `use_cpu` only to a single process.
            environment["ACCELERATE_USE_CPU"] = "true"
    lines.append('folder=$(dirname "$0")')
    if to == "torchrun" and exported.configuration.importable:
        lines.append('export PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}"')
    if environment.keys() & ALLOCATOR.keys():
        lines.append("# Measured with MALLOC_*: glibc keeps freed memory for the next step.")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    torchrun = f"torchrun --nproc-per-node {len(nodes[0])}"
    if len(nodes) == 1:
        torchrun += " --standalone"
    else:
        torchrun += f' --nnodes {len(nodes)} --rdzv-backend c10d --rdzv-endpoint "$MASTER:29500"'
    machines = " --main_process_port 0"  # any free port
    if len(nodes) > 1:
        machines = ' --machine_rank "$NODE" --main_process_ip "$MASTER" --main_process_port 29500'
    launchers = {
        "torchrun": f'{torchrun} "$@"',
        "accelerate": f'accelerate launch{machines} --config_file "$folder/{ACCELERATE}" "$@"',
        # `deepspeed.add_config_arguments` reads these arguments.
        "deepspeed": f'{torchrun} "$@" --deepspeed --deepspeed_config "$folder/{DEEPSPEED}"',
    }
    lines.append(f"exec {launchers[to]}")
    return "".join(f"{one_line(line)}\n" for line in lines)
