"""One rank of a trial, from its environment to the files that it leaves."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shardmark.core.environment_variables import NODE_VARIABLE
from shardmark.core.errors import ShardmarkError, error_kind
from shardmark.core.run_files import JOINED_FILE
from shardmark.core.shares import Shard
from shardmark.measure.memory.cuda_memory import CudaPeak
from shardmark.measure.step.clock import clock_for
from shardmark.measure.step.progress import Progress, Teller
from shardmark.measure.step.recorder import Recorder, Spans
from shardmark.results.schema import ProbeRecord, RankError
from shardmark.strategies.base import RankContext, Server, Worker
from shardmark.train.checkpoints import Checkpoints
from shardmark.train.epochs import Training, train_epochs
from shardmark.train.loop import Steps
from shardmark.train.probe import held_bytes, probe
from shardmark.train.record import RankReport
from shardmark.train.schedule import learning_rate_of, step_shard_seed
from shardmark.train.slowness import slowed
from shardmark.trials.trial import Trial
from shardmark.workloads.base import Batch, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A rank that has its place: device, process group, threads."""

    process: RankContext
    threads: int


Work = Callable[[Trial, Path, Settled, RankReport], None]


def run_rank(trial: Trial, directory: Path, work: Work) -> bool:
    """Do this process's part of the trial and leave its files in `directory`.

    Returns whether it went well; what went wrong stands in the rank's record, never lost.
    """
    report = RankReport(directory, rank=int(os.environ["RANK"]))
    try:
        with settled(trial) as place:
            report.describe(place.process.device, place.threads)
            work(trial, directory, place, report)
    except Exception as error:
        traceback.print_exc()
        report.error = RankError(
            kind=error_kind(error),
            message=message_of(error),
            remedy=getattr(error, "remedy", None),
            at_seconds=time.time(),
        )
        report.write()
        return False
    report.write()
    return True


def message_of(error: Exception) -> str:
    """What to tell the user: our own errors say all themselves, others by class and message."""
    own = isinstance(error, ShardmarkError)
    return str(error) if own else f"{type(error).__name__}: {error}"


@contextmanager
def settled(trial: Trial) -> Iterator[Settled]:
    """Threads, device and process group as the trial wants them, from torchrun's environment."""
    env = {key: int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"]))
    cores = len(os.sched_getaffinity(0))
    threads = trial.recipe.threads_per_rank or max(1, cores // local_world_size)
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = trial.recipe.tf32
    torch.backends.cudnn.allow_tf32 = trial.recipe.tf32
    torch.backends.cudnn.benchmark = False
    strategy = trial.built_strategy
    kind = strategy.rank_device(env["RANK"], trial.world_size, trial.device_type)
    device = torch.device(kind, env["LOCAL_RANK"]) if kind == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # A rank that waits longer than a trial may last waits for somebody dead.
    patience = timedelta(seconds=trial.limits.trial_seconds + 60)
    backend = strategy.backend(trial.device_type)
    dist.init_process_group(
        backend, timeout=patience, device_id=device if backend == "nccl" else None
    )
    process = RankContext(
        rank=env["RANK"],
        world_size=env["WORLD_SIZE"],
        local_rank=env["LOCAL_RANK"],
        local_world_size=local_world_size,
        device=device,
        devices=trial.world_size if env["WORLD_SIZE"] == 1 else 1,
        node=int(os.environ.get(NODE_VARIABLE, "0")),
        nodes=trial.nodes,
    )
    yield Settled(process=process, threads=threads)
    dist.destroy_process_group()


def measure(trial: Trial, directory: Path, place: Settled, report: RankReport) -> None:
    """Train the whole trial, measured."""
    process, device = place.process, place.process.device
    strategy = trial.built_strategy
    workload = trial.workload.build(trial.recipe.seed)
    report.workload = workload
    report.settings = dict(strategy.settings(trial.recipe))
    shard = trial.layout.ranks[process.rank].share
    checkpoints = Checkpoints.joined(trial, directory, process)
    role = strategy.start(workload, trial.recipe, process)
    (directory / JOINED_FILE.format(process.rank)).touch()
    training = Training.of(trial, workload)
    report.steps_per_epoch = training.steps_per_epoch
    if isinstance(role, Server):
        serve(role, report, checkpoints)
        return
    assert shard is not None, "a rank without a share is a server"
    report.cuda_peak = CudaPeak(device) if device.type == "cuda" else None
    recorder = Recorder(clock_for(device), [report.cuda_peak] if report.cuda_peak else [])
    report.recorder = recorder
    report.worker = role
    report.start_weights(role.full_parameters())
    with Progress.opened(directory, process.rank, training.total_steps) as progress:
        teller = Teller(progress, recorder.losses, on_host=device.type == "cpu")
        recorder.observe(teller)
        report.steps = _steps_of(trial, training, process.rank, teller.stepped)
        if checkpoints is not None:
            role.group.barrier()  # everybody has seen the initial weights
            checkpoints.restore_worker(role, report, device)
            # A restarted process is as cold as a new one.
            warm = recorder.step + trial.measure.warmup_steps
            report.steps = replace(report.steps, warmup_steps=warm)
        batches = train_epochs(
            training,
            worker=role,
            workload=workload,
            shard=shard,
            steps=report.steps,
            report=report,
            device=device,
            checkpoints=checkpoints,
        )
    role.group.barrier()
    report.end_weights(role.full_parameters())
    report.exchange = role.exchange()
    report.write()  # whatever happens in the probe, the measurement is safe
    role.group.barrier()  # nobody changes the weights before everybody has seen them
    if trial.measure.probe:
        report.probe = _probe(role, workload, batches, shard, device)
    role.close()


def _steps_of(trial: Trial, training: Training, rank: int, on_step: Callable[[int], None]) -> Steps:
    seed = trial.recipe.seed
    return Steps(
        warmup_steps=trial.measure.warmup_steps,
        learning_rate=learning_rate_of(trial.recipe, training.total_steps),
        seed_of=lambda step_shard: step_shard_seed(
            seed, step=step_shard.step, shard_index=step_shard.shard.index
        ),
        on_step=on_step,
        pace=slowed(trial.slow_ranks.get(rank, 1.0)),
    )


def serve(server: Server, report: RankReport, checkpoints: Checkpoints | None = None) -> None:
    """Hold parameters for the workers; what is held and passed is recorded at the end."""
    report.role = "server"
    report.write()
    if checkpoints is None:
        server.serve()
    else:
        checkpoints.restore_server(server, report)
        server.serve(checkpoints.save_server(server, report))
    report.exchange = server.exchange()
    report.probe = ProbeRecord(
        **held_bytes(server.held_state()),
        peak_memory_bytes=server.held_bytes(),
        collectives=None,
        reasons={"exposed_communication_seconds": "a server computes nothing of its own"},
    )


def _probe(
    worker: Worker,
    workload: Workload,
    batches: Iterator[Batch],
    shard: Shard,
    device: torch.device,
) -> ProbeRecord:
    def take_step(spans: Spans) -> object:
        return worker.step(next(batches).to(device), spans)

    record = probe(worker, take_step, device)
    if shard.index == 0:
        model = workload.build_model()
        counted = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "flops_per_sample": workload.sample_input_flops(model),
        }
        record = record.model_copy(update=counted)
    return record
