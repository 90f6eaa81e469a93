"""Where the time of a row's steps goes, as its ranks and as the machine's cores saw it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from statistics import fmean

from shardmark.analysis.compare.rows import Row
from shardmark.results.schema import TrialResult
from shardmark.results.store import RunFolder

SPANS = ("data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Means over repeats and ranks, for `samples` samples trained."""

    seconds: float
    """From samples_per_second, so that it agrees with the headline."""
    median_seconds: float
    """Of the steps."""
    data: float
    forward: float
    backward: float
    optimizer: float
    exposed: float | None
    """Communication that nothing hid, at most forward, backward and optimizer, which hold it."""

    @property
    def work(self) -> float:
        """Spans in which a rank computes or communicates."""
        return self.forward + self.backward + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuUse:
    """What the ranks of one machine asked of its cores."""

    processes: int
    threads: int
    """Of all processes together, as they were set."""
    cores: float
    busy_seconds: float
    """CPU time of all processes for the same samples."""

    @property
    def floor_seconds(self) -> float:
        """The cores cannot do it in less."""
        return self.busy_seconds / self.cores

    @property
    def sharing_seconds(self) -> float:
        """What a core for each thread could save at most; nothing where there are enough."""
        return max(0.0, self.floor_seconds - self.busy_seconds / max(self.threads, 1))


def samples_per_step(row: Row) -> float | None:
    """As the recipe declares them, all ranks together."""
    recipe = row.trials[0].trial.get("recipe", {})
    total, per_rank = recipe.get("global_batch"), recipe.get("per_rank_batch")
    if total is not None:
        return float(total)
    return None if per_rank is None else float(per_rank) * row.trials[0].layout.shares


def common_repeats(row: Row, other: Row) -> frozenset[int]:
    """Those of both, so that what disturbed both cancels; all where there is no common one."""
    one, two = ({trial.repeat for trial in r.ok_trials} for r in (row, other))
    return frozenset(one & two or one | two)


def step_time(row: Row, samples: float, repeats: Collection[int]) -> StepTime | None:
    """The time for so many samples; None where some part was not recorded."""
    own = samples_per_step(row)
    trials = [trial for trial in row.ok_trials if trial.repeat in repeats]
    found = [one for trial in trials if (one := _of_trial(trial)) is not None]
    if own is None or not found or len(found) < len(trials):
        return None
    scale = samples / own

    def mean(index: int) -> float:
        return scale * fmean(one[index] for one in found)

    exposed = [_mean_over_ranks(trial, "exposed_communication_seconds") for trial in trials]
    known = [one for one in exposed if one is not None]
    data, forward, backward, optimizer = (mean(index) for index in range(2, 6))
    most = forward + backward + optimizer
    return StepTime(
        seconds=samples * fmean(one[0] for one in found),
        median_seconds=mean(1),
        data=data,
        forward=forward,
        backward=backward,
        optimizer=optimizer,
        exposed=min(scale * fmean(known), most) if len(known) == len(trials) else None,
    )


def _of_trial(trial: TrialResult) -> tuple[float, ...] | None:
    """Seconds of one sample, and of a step's median and spans; None where one is missing."""
    rate = trial.metrics.get("samples_per_second")
    spans = [_mean_over_ranks(trial, name) for name in ("step_seconds", *SPANS)]
    known = [one for one in spans if one is not None]
    if rate is None or rate.value <= 0 or len(known) < len(spans):
        return None
    return (1 / rate.value, *known)


def _mean_over_ranks(trial: TrialResult, name: str) -> float | None:
    summary = trial.metrics.get(name)
    if summary is None:
        return None
    return summary.value if summary.mean is None else summary.mean


def cpu_use(row: Row, samples: float, repeats: Collection[int]) -> CpuUse | None:
    """Of ranks on the CPUs of one machine; None elsewhere, or where CPU time was not sampled."""
    trials = [trial for trial in row.ok_trials if trial.repeat in repeats]
    cores = None if row.folder is None else usable_cores(row)
    ranks = [rank for trial in trials for rank in trial.ranks]
    one_machine = len({rank.host for rank in ranks}) == 1
    if not cores or not one_machine or any(rank.device != "cpu" for rank in ranks):
        return None
    busy = []
    for trial in trials:
        percent = _mean_over_ranks(trial, "cpu_percent")
        rate = trial.metrics.get("samples_per_second")
        if percent is None or rate is None or rate.value <= 0:
            return None
        busy.append(percent / 100 * len(trial.ranks) * samples / rate.value)
    first = trials[0].ranks
    return CpuUse(
        processes=len(first),
        threads=sum(rank.threads for rank in first),
        cores=cores,
        busy_seconds=fmean(busy),
    )


def usable_cores(row: Row) -> float | None:
    """Cores that the run could use: the affinity's, or a container's smaller quota."""
    assert row.folder is not None, "the caller looked"
    cpu = RunFolder(row.folder).read_environment().get("cpu")
    if not isinstance(cpu, dict):
        return None
    known = [cpu.get("usable_cores"), cpu.get("quota_cores")]
    numbers = [float(one) for one in known if isinstance(one, int | float)]
    return min(numbers, default=None)
