"""Runs one rank of a trial, from its environment to the files that it writes."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # torch exports them lazily
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)

from shardmark.base.errors import InputError, ShardmarkError, StrategyUnavailable, error_kind
from shardmark.base.files.run_files import INITIAL_WEIGHTS_FILE
from shardmark.base.results.schema import ProbeRecord, RankError
from shardmark.base.system.environment_variables import NODE_VARIABLE, STORE_VARIABLE
from shardmark.ranks.measure.memory.tensors import CudaPeak, temporary_memory
from shardmark.ranks.measure.step.progress import ProgressWriter
from shardmark.ranks.measure.step.recorder import Recorder, clock_for
from shardmark.ranks.strategies.base import RankContext, Server
from shardmark.ranks.train.loop import LoopOptions, SlowRank, Training
from shardmark.ranks.train.pacing import Pacing
from shardmark.ranks.train.probe import held_bytes, model_counts, probe
from shardmark.ranks.train.record import RankReport, structure_sha256, weights_sha256
from shardmark.ranks.train.schedule import Schedule, learning_rate_of, set_numerics
from shardmark.ranks.trial import Trial
from shardmark.ranks.workloads import build_workload
from shardmark.ranks.workloads.model_building import build_on_meta, perturb_by_rounding

if TYPE_CHECKING:
    from shardmark.base.recipe import Recipe
    from shardmark.ranks.measure.step.compilation import Compilation
    from shardmark.ranks.strategies.initial_weights import InitialWeights
    from shardmark.ranks.workloads.base import Workload

Task = Callable[[Trial, Path, RankContext, RankReport], None]


def run_rank(trial: Trial, directory: Path, task: Task) -> bool:
    """Run a task as one rank, and write its files into `directory`.

    Returns True if it succeeded.  Otherwise the rank's record holds the error.
    """
    report = RankReport(directory, rank=int(os.environ["RANK"]))
    subject = Subject(trial)
    if trial.script is not None:
        from shardmark.ranks.train.script import ScriptSubject

        subject = ScriptSubject(trial)
    try:
        subject.run(task, directory, report)
        if dist.is_initialized():
            dist.destroy_process_group()  # not after an error: others may wait in it
        report.write()
    except Exception as error:
        subject.print_error(error)
        explained = subject.explained(error)
        report.error = RankError(
            kind=error_kind(explained),
            message=_message(explained),
            remedy=getattr(explained, "remedy", None),
            at_seconds=time.time(),
        )
        report.write()
        return False
    return True


class Subject:
    """A task, as the subject of a rank's work; a script is the other kind of subject."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial

    def run(self, task: Task, directory: Path, report: RankReport) -> None:
        initial_weights = _initial_weights(self.trial, directory)
        context = replace(join_group(self.trial), initial_weights=initial_weights)
        report.describe(context.all_devices, context.threads)
        task(self.trial, directory, context, report)

    def print_error(self, error: Exception) -> None:
        traceback.print_exception(error)

    def explained(self, error: Exception) -> Exception:
        """Return the refusal of what a library or an optimizer of the user raised, or the error."""
        if isinstance(error, ShardmarkError):
            return error
        path = self.trial.recipe.optimizer.path
        if path is not None and "closure" in str(error):
            return InputError(
                "recipe.optimizer.path",
                f"{path} takes a step by a closure, which computes the loss again ({error})",
                "an optimizer whose step() needs no argument: strategies compute one gradient a"
                " step",
            )
        from shardmark.ranks.strategies.sharded_calls import refusal_of

        holds = self.trial.layout.ranks[int(os.environ["RANK"])].holds
        sharded = min(holds.parameters, holds.gradients, holds.optimizer_state) < 1
        return refusal_of(error, self.trial.strategy.name if sharded else None) or error


def _message(error: Exception) -> str:
    """Return the message of an error; others than ours get their class and the user's line."""
    if isinstance(error, StrategyUnavailable):
        return error.reason  # its remedy is kept beside it
    if isinstance(error, ShardmarkError):
        return str(error)
    from shardmark.scripts.interventions.base import is_users

    frames = [item for item in traceback.walk_tb(error.__traceback__) if is_users(item[0])]
    places = [f" ({Path(frame.f_code.co_filename).name}:{line})" for frame, line in frames[-1:]]
    first, *rest = f"{type(error).__name__}: {str(error).strip()}".split("\n")
    return "\n".join(["".join([first, *places]), *rest])


def _initial_weights(trial: Trial, directory: Path) -> InitialWeights | None:
    """Fork a process that builds a large model's weights, before there are threads."""
    if not trial.built_strategy.builds_in_parts():
        return None
    from shardmark.ranks.strategies.initial_weights import InitialWeights

    return InitialWeights.fork(
        directory / INITIAL_WEIGHTS_FILE,
        leads=os.environ["LOCAL_RANK"] == "0",
        build=lambda: workload_of(trial).build_model(),
    )


def workload_of(trial: Trial) -> Workload:
    """Build the trial's task; a twin's initial weights differ by one rounding."""
    workload = build_workload(trial.workload, trial.recipe.seed)
    if trial.twin:
        build, recipe = workload.build_model, trial.recipe
        perturb = partial(perturb_by_rounding, seed=recipe.seed, weights=recipe.weights)
        workload.build_model = lambda: perturb(build())  # type: ignore[method-assign]
    return workload


def join_group(trial: Trial) -> RankContext:
    """Set threads and device, and join the process group that the environment describes."""
    rank, world_size, local_rank = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    )
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    threads = trial.threads_of(local_world_size)
    torch.set_num_threads(threads)
    strategy = trial.built_strategy
    on_cpu = trial.layout.ranks[rank].on_cpu
    device = torch.device("cpu" if on_cpu else trial.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    timeout = timeout_of(trial)
    backend = strategy.backend(trial.device_type, trial.recipe)
    dist.init_process_group(
        backend,
        store=store_of_ranks(world_size, timeout),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if "nccl" in backend else None,
    )
    return RankContext(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        device=device,
        # DataParallel has one process for all devices.
        devices=trial.world_size if world_size == 1 else 1,
        threads=threads,
        node=int(os.environ.get(NODE_VARIABLE, "0")),
        nodes=trial.nodes,
    )


def timeout_of(trial: Trial) -> timedelta:
    """Time after which a rank ends that the launcher, which ends the trial before, cannot reach."""
    return timedelta(seconds=trial.limits.trial_seconds + 60)


def store_of_ranks(world_size: int, timeout: timedelta) -> Store:
    """Open the store that the agent names: a file that the ranks inherit, or node 0's store."""
    kind, place, *rest = os.environ[STORE_VARIABLE].split()
    if kind == "file":
        store: Store = FileStore(place, world_size)
    else:
        port, prefix = rest
        server = TCPStore(place, int(port), is_master=False, wait_for_workers=False)
        store = PrefixStore(prefix, server)
    store.set_timeout(timeout)
    return store


def measure(trial: Trial, directory: Path, context: RankContext, report: RankReport) -> None:
    """Train as one rank of the trial, and measure it."""
    device, recipe = context.device, trial.recipe
    warmup_seconds, window_seconds = trial.least_seconds
    workload = workload_of(trial)
    schedule = Schedule.for_trial(trial, workload)
    position = trial.layout.ranks[context.rank]
    report.workload = workload
    numerics = trial.built_strategy.numerics(recipe).descriptions
    report.settings = {**trial.built_strategy.settings(recipe), "mathematics": numerics}
    report.steps_per_epoch = schedule.steps_per_epoch
    report.counts_samples = position.counts_loss
    worker = trial.built_strategy.start(workload, recipe, context)
    set_numerics(recipe)
    if isinstance(worker, Server):
        serve(worker, report, device)
        return
    assert position.share is not None, "a rank without a share is a server"
    devices = context.all_devices
    report.cuda_peak = CudaPeak(devices) if device.type == "cuda" else None
    recorder = Recorder(clock_for(devices), [report.cuda_peak] if report.cuda_peak else [])
    report.recorder, report.worker = recorder, worker
    with temporary_memory(device):
        report.initial_sha256 = weights_sha256(worker.each_parameter())
    with (
        ProgressWriter.opened(
            directory,
            context.rank,
            schedule.total_steps,
            losses=recorder.losses,
            on_host=device.type == "cpu",
        ) as progress,
        _compilation(recipe, recorder) as report.compilation,
    ):
        recorder.observe(progress)
        slow_factor = trial.slow_ranks.get(context.rank, 1.0)
        options = LoopOptions(
            devices=devices,
            seed=recipe.seed,
            learning_rate=learning_rate_of(recipe, schedule.total_steps),
            on_step=progress.stepped,
            slow_rank=SlowRank(slow_factor) if slow_factor > 1 else None,
        )
        Training(
            schedule=schedule,
            options=options,
            worker=worker,
            workload=workload,
            shard=position.share,
            recorder=recorder,
            report=report,
            pacing=Pacing(
                warmup_steps=trial.measure.warmup_steps,
                warmup_seconds=warmup_seconds,
                window_seconds=window_seconds,
                round_steps=worker.round_steps(),
            ),
            on_added=progress.lengthen,
        ).run()
    worker.group.barrier()
    report.exchange = worker.exchange()
    report.write()  # an error in the probe loses no measurement
    worker.group.barrier()  # no rank changes the weights before all have read them
    if trial.measure.probe:
        batches = workload.batches(schedule.plan, position.share)
        report.probe = probe(
            worker, lambda spans: worker.step(next(batches).to(device), spans), device
        )
        if position.share.index == 0:
            model = build_on_meta(workload) or workload.build_model()
            report.structure_sha256 = structure_sha256(model)
            counts = model_counts(
                workload,
                model,
                recipe,
                tensor_ranks=trial.layout.tensor,
                sequence_ranks=trial.layout.sequence,
            )
            report.probe = report.probe.model_copy(update=counts | dict(worker.between_stages()))
    worker.close()


def _compilation(recipe: Recipe, recorder: Recorder) -> AbstractContextManager[Compilation | None]:
    """Return the observer of torch.compile, or None if the recipe compiles nothing."""
    if recipe.compile == "none":
        return nullcontext()
    from shardmark.ranks.measure.step.compilation import Compilation

    compilation = Compilation()
    recorder.observe(compilation)
    return compilation


def serve(server: Server, report: RankReport, device: torch.device) -> None:
    """Hold parameters for the workers; record at the end what the server holds and exchanged."""
    report.role = "server"
    report.write()
    server.serve()
    report.exchange = server.exchange()
    report.probe = ProbeRecord(
        **held_bytes(server.held_state(), device),
        trained_matrices=(),
        peak_memory_bytes=server.held_bytes(),
        collectives=None,
        reasons={"exposed_communication_seconds": "a server computes nothing of its own"},
    )


def measure_trial_links(
    trial: Trial, directory: Path, context: RankContext, report: RankReport
) -> None:
    """Measure the links between all ranks; rank 0 writes the timings.  Collective."""
    from shardmark.ranks.measure.network.links import measure_links
    from shardmark.ranks.measure.network.probe import DEFAULT_SECONDS, RECORD_FILE

    report.write()
    record = measure_links(
        context.device,
        seconds=trial.measure.link_seconds or DEFAULT_SECONDS,
        node=context.node,
        threads=torch.get_num_threads(),
    )
    if record is not None:
        (directory / RECORD_FILE).write_text(record.model_dump_json())
