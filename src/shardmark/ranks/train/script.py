"""Runs a script as one rank of a trial: measures its steps by hooks, and ends it after them."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import psutil
import torch

from shardmark.base.errors import ShardmarkError
from shardmark.base.masking import masked_command
from shardmark.base.results.schema import ProbeRecord
from shardmark.ranks.measure.memory.tensors import CudaPeak
from shardmark.ranks.measure.step.collectives import CollectiveCounter
from shardmark.ranks.measure.step.hooks import StepHooks
from shardmark.ranks.measure.step.progress import ProgressWriter
from shardmark.ranks.measure.step.recorder import Recorder, clock_for
from shardmark.ranks.measure.step.turns import LEAST_STEPS, Turn, TurnClock
from shardmark.ranks.train.pacing import MAX_STEPS, Pacing
from shardmark.ranks.train.probe import profile_two_steps
from shardmark.ranks.train.rank import Subject, Task, measure, store_of_ranks, timeout_of
from shardmark.ranks.train.record import RankReport
from shardmark.ranks.trial import Trial
from shardmark.ranks.workloads.script.task import run_as_main
from shardmark.scripts.interventions import built, facts_of, named_in
from shardmark.scripts.interventions.base import Place
from shardmark.scripts.lightning import set_devices_of_lightning

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it lazily

DEFAULT_STEPS = 30
"""Measured steps of a script for which the recipe sets no number."""
STEPS_PER_WORKER = 4
"""Steps of a turn for each loader's worker: what it had loaded before is then used up."""
WAITING_SHARE = 0.05
"""Fraction of the time that a script which takes turns may wait for workers that wait, too."""
WAITS = "the script waits for data, and some come while it is stopped: it takes no turns"
PEERS_SECONDS = 60.0
"""Longest wait for the other ranks before a rank ends its script."""
NO_STEP = "the script took no optimizer step"
NO_STEP_REMEDY = "the process that Shardmark starts must train, and not start others (mp.spawn)"
NOT_RECORDED = "it ended before it took untimed steps"
RUNS_ON = "the script ran to its end (workload.until_exit): no untimed steps followed"
COUNTED = ("collectives", "exposed_communication_seconds", "peak_memory_bytes")
"""Fields of the probe that untimed steps of a script count."""


class ScriptError(ShardmarkError):
    """The script failed or took too few steps; the message is the user's own or says so."""


class ScriptFinished(SystemExit):
    """Raised in the script's last optimizer step, after everything has been measured."""


class ScriptSubject(Subject):
    """A script: its steps are measured by hooks, and its errors are its own."""

    def run(self, task: Task, directory: Path, report: RankReport) -> None:
        """Run the script in this process, and record its steps.

        Raises the script's error, and `ScriptError` if it ended without enough steps.
        """
        if task is not measure:
            super().run(task, directory, report)
            return
        assert self.trial.script is not None, "it is the subject"
        store = store_of_ranks(int(os.environ["WORLD_SIZE"]), timeout_of(self.trial))
        _set_environment(self.trial)
        with ExitStack() as stack:
            measured = _MeasuredScript(self.trial, directory, report, store, stack)
            for intervention in measured.interventions:
                intervention.install()
            set_devices_of_lightning()
            stack.enter_context(measured.hooks.installed())
            try:
                run_as_main(self.trial.script)
            except ScriptFinished:
                pass
            except SystemExit as end:
                if end.code not in (None, 0) and not measured.done:
                    reason = end.code if isinstance(end.code, str) else f"exit code {end.code}"
                    raise ScriptError(f"the script ended with {reason}") from None
            except Exception as error:
                if not measured.done:
                    raise
                self.print_error(error)
                measured.not_probed(f"the script failed in an untimed step: {error}")
            measured.script_ended()

    def print_error(self, error: Exception) -> None:
        """Print the error with its traceback from the script's first frame on.

        A `ScriptError` is not printed: the output is the script's own, and the record has the
        message.
        """
        if isinstance(error, ScriptError):
            return
        frames: TracebackType | None = error.__traceback__
        outside = (str(Path(__file__).parents[2]), "<frozen runpy>")
        while frames is not None and frames.tb_frame.f_code.co_filename.startswith(outside):
            frames = frames.tb_next
        traceback.print_exception(error.with_traceback(frames))

    def explained(self, error: Exception) -> Exception:
        return error


def _set_environment(trial: Trial) -> None:
    """Set what libraries read of torchrun, in addition to the variables of every rank."""
    several = max(trial.ranks_on_cores or 1, int(os.environ["LOCAL_WORLD_SIZE"])) > 1
    threads = trial.recipe.threads_per_rank
    if threads is None and several and "OMP_NUM_THREADS" not in os.environ:
        threads = 1
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    if trial.device_type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ |= {
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the agent listens, and no rank does
        "TORCHELASTIC_RUN_ID": trial.id,
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _children_seconds() -> float:
    """Return the CPU time of the processes below this one."""
    ended, processes = os.times(), psutil.Process().children(recursive=True)
    living = sum(time.user + time.system for time in (one.cpu_times() for one in processes))
    return ended.children_user + ended.children_system + living


class _MeasuredScript:
    """The stretches of a script's steps, as in `train.loop`: warm-up, windows, untimed steps."""

    def __init__(
        self, trial: Trial, directory: Path, report: RankReport, store: Store, stack: ExitStack
    ) -> None:
        self._trial, self._directory = trial, directory
        self._report, self._store, self._stack = report, store, stack
        measure = trial.measure
        warmup_seconds, window_seconds = trial.least_seconds
        self._agrees = max(warmup_seconds, window_seconds) > 0
        assert trial.script is not None, "it is the subject"
        self._command, self._until_exit = trial.script.command, trial.script.until_exit
        self._pacing = Pacing(
            warmup_steps=measure.warmup_steps,
            warmup_seconds=warmup_seconds,
            window_seconds=0.0 if self._until_exit else window_seconds,
        )
        steps = trial.recipe.steps or measure.warmup_steps + DEFAULT_STEPS
        self._steps = sys.maxsize if self._until_exit else steps
        """Number of steps of the recipe, warm-up included."""
        self._first_step = self._end_step = self._stretches = 0
        """First step and end of the current stretch, and the number of stretches."""
        self._untimed: Iterator[None] = iter(())
        self.done = False
        """True once the script's speed is measured."""
        self._finished = False
        """True once the script was asked to end."""
        self._recorder: Recorder | None = None
        self._progress: ProgressWriter | None = None
        self._device = torch.device("cpu")
        world_size = int(os.environ["WORLD_SIZE"])
        place = Place(rank=int(os.environ["RANK"]), world_size=world_size, store=store)
        self.interventions = built(named_in(trial.script.interventions), place)
        self._begun = False
        """True once the interventions have begun."""
        self._turn = Turn.current if place.rank == 0 else None
        """The turn that this rank ends."""
        self._computed_before = (0.0, 0.0)
        """CPU times of this thread and of the loader's workers before the first measured step."""
        self.hooks = StepHooks(self._begin, self._stepped)

    def _begin(self, device: torch.device) -> Recorder:
        """Start to record, at the first backward pass."""
        report, on_cpu = self._report, device.type == "cpu"
        report.describe((device,), torch.get_num_threads())
        report.cuda_peak = None if on_cpu else CudaPeak((device,))
        clock = clock_for((device,)) if Turn.current is None else TurnClock(Turn.current)
        recorder = Recorder(clock, [report.cuda_peak] if report.cuda_peak else [])
        self._recorder, self._device, report.recorder = recorder, device, recorder
        progress = ProgressWriter.opened(
            self._directory,
            int(os.environ["RANK"]),
            0 if self._until_exit else self._steps,
            losses=recorder.losses,
            on_host=on_cpu,
        )
        self._progress = self._stack.enter_context(progress)
        recorder.observe(self._progress)
        recorder.start_training()
        recorder.first_step_at_seconds = self.hooks.first_event_at_seconds
        self._start_stretch(recorder, self._progress)
        return recorder

    def _start_stretch(self, recorder: Recorder, progress: ProgressWriter) -> None:
        """Begin a stretch; it has no steps once everything is measured."""
        count, measured = self._pacing.next_steps, self._pacing.warm
        if measured:
            remaining = self._steps - recorder.step
            count = min(remaining, MAX_STEPS) if remaining > 0 else self._pacing.added_steps
        if self._agrees:
            count, measured = self._of_first_rank(count, measured)
        if self.interventions and not self._begun and (measured or not count):
            self._begun = True
            self._wait_for_all("warm")
            for intervention in self.interventions:
                intervention.begin()
        self._first_step, self._end_step = recorder.step, recorder.step + count
        if self._end_step > self._steps:
            progress.lengthen(self._end_step)
        if count:
            recorder.start_window(measured=measured)

    def _of_first_rank(self, count: int, measured: bool) -> tuple[int, bool]:
        """Return rank 0's values: all ranks must take and measure the same steps."""
        key = f"stretch-{self._stretches}"
        self._stretches += 1
        if os.environ["RANK"] == "0":
            self._store.set(key, f"{count} {int(measured)}")
        steps, flag = self._store.get(key).split()  # waits
        return int(steps), flag == b"1"

    def _stepped(self) -> None:
        """Called after each step; raises `ScriptFinished` after the last one."""
        recorder, progress = self._recorder, self._progress
        assert recorder is not None, "a step ends after `_begin`"
        assert progress is not None, "a step ends after `_begin`"
        if not self.done:
            progress.stepped(recorder.step)
            for intervention in self.interventions if not self._begun else ():
                intervention.stepped(recorder.step)
            if recorder.step < self._end_step:
                self._end_turn()
                return
            self._end_stretch(recorder)
            self._end_turn()
            self._start_stretch(recorder, progress)
            if self._end_step > recorder.step:
                return
            self._speed_is_measured(recorder)
            self._untimed = self._untimed_steps() if self._trial.measure.probe else iter(())
        if next(self._untimed, self) is self:
            with suppress(RuntimeError):  # a rank failed, and reports it
                # They may still read from this rank's connections.
                self._wait_for_all("caught" if self._finished else "finished")
            if self._finished:  # a bare `except` caught it, and the script goes on
                self._report.write()
                sys.stdout.flush()
                os._exit(0)
            self._finished = True
            raise ScriptFinished(0)

    def _end_turn(self) -> None:
        if self._turn is not None and self._pacing.warm:
            if not any(self._computed_before):
                self._computed_before = time.thread_time(), _children_seconds()
            self._turn.stepped(LEAST_STEPS + STEPS_PER_WORKER * self.hooks.batches.workers)

    def _check_waits(self, recorder: Recorder) -> None:
        """Raise `ScriptError` if this rank waited for workers that did not compute then."""
        if self.hooks.batches.workers:
            steps = recorder.flushed_steps[recorder.windows[0].first_step :]
            waited = sum(step.seconds.get("data", 0.0) for step in steps)
            computed, loaded = self._computed_before
            idle = recorder.measured_seconds - (time.thread_time() - computed)
            loading = _children_seconds() - loaded
            if min(waited, idle) > max(2 * loading, WAITING_SHARE * recorder.measured_seconds):
                raise ScriptError(WAITS)

    def _end_stretch(self, recorder: Recorder, *, at_last_step: bool = False) -> None:
        seconds = recorder.stop_window(at_last_step=at_last_step)
        recorder.flush()
        if steps := recorder.step - self._first_step:
            self._pacing.record(steps, seconds, recorder.measured_seconds)

    def _speed_is_measured(self, recorder: Recorder) -> None:
        """Complete the record of all timed steps, and write it: later errors do not lose it."""
        if self._turn is not None:
            self._turn.last()
            self._check_waits(recorder)
        self.done, self.hooks.recording = True, False
        report, batches = self._report, self.hooks.batches
        steps = (step for w in recorder.windows for step in range(w.first_step, w.end_step))
        counted = all(len(recorder.sample_ids[step]) for step in steps)
        if not counted:  # a step of all ranks counts as one sample
            recorder.sample_ids = [range(1)] * recorder.step
            report.counts_samples = os.environ["RANK"] == "0"
        elif any(self.hooks.tokens):
            report.tokens = self.hooks.tokens
        report.settings = {
            "command": masked_command(self._command),
            "samples_counted_by": batches.source if counted else None,
            "steps_as_samples": not counted,
        }
        if self.interventions:
            report.settings = {**report.settings, "seen": facts_of(self.interventions)}
        report.end_epoch(recorder.step, None)
        self.not_probed(NOT_RECORDED)
        report.write()

    def not_probed(self, reason: str) -> None:
        """Record why untimed steps have no counts."""
        self._report.probe = ProbeRecord(reasons=dict.fromkeys(COUNTED, reason))

    def _untimed_steps(self) -> Iterator[None]:
        """Count collectives in one step and profile two; a step is taken at each `yield`."""
        with CollectiveCounter(lambda: self.hooks.phase) as counter:
            yield
        peak, exposed, reasons = yield from profile_two_steps(self._device)
        self._report.probe = ProbeRecord(
            **counter.probe_fields(),
            peak_memory_bytes=peak,
            exposed_communication_seconds=exposed,
            reasons=reasons,
        )

    def _wait_for_all(self, name: str) -> None:
        self._store.set(f"{name}-{os.environ['RANK']}", "")
        ranks = range(int(os.environ["WORLD_SIZE"]))
        self._store.wait([f"{name}-{rank}" for rank in ranks], timedelta(seconds=PEERS_SECONDS))

    def script_ended(self) -> None:
        """Complete the record of a script that ended by itself.  Raises `ScriptError`."""
        if self.done:
            return
        recorder = self._recorder
        if recorder is None or not recorder.step:
            raise ScriptError(f"{NO_STEP}: {NO_STEP_REMEDY}")
        self._end_stretch(recorder, at_last_step=True)
        if not recorder.windows:
            fewer = "" if self.interventions else ", or warm up for fewer (measure.warmup_steps)"
            raise ScriptError(
                f"the script ended after {recorder.step} optimizer steps, which are warm-up; let it"
                f" take {self._trial.measure.warmup_steps + 1} or more{fewer}"
            )
        self._speed_is_measured(recorder)
        if self._until_exit:
            self.not_probed(RUNS_ON)
