"""Disturbances are found and named with a remedy; quiet runs are left alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.results.schema import StabilityFinding, TrialResult
from shardmark.base.results.schema import StabilityKind as Kind
from shardmark.base.results.store import StoredRun
from shardmark.base.statistics.changes import jump_of, trend_of
from shardmark.bench.analysis.compare.comparison import Comparison, compare
from shardmark.bench.analysis.compare.rows import Row, rows_of
from shardmark.bench.analysis.compare.verdicts import METRIC
from shardmark.bench.analysis.diagnose.stability import Instability, warnings_of
from shardmark.bench.analysis.diagnose.trial_stability import FALSE_ALARM_RATE, stability_of_trial
from shardmark.bench.analysis.trial.raw_files import raw_lines
from shardmark.bench.report.table.notes import NoteKind, notes_of
from tests import present
from tests.golden.invented import STARTED_AT_SECONDS, compare_trials, invented_trial


def step_lines(seconds: Iterable[float]) -> list[dict[str, Any]]:
    """Steps as ranks write them: five steps of warm-up, and a second rank that is always slow."""
    return [
        {"rank": rank, "step": step, "measured": step >= 5, "step_seconds": each * (1 + 9 * rank)}
        for rank in (0, 1)
        for step, each in enumerate([9.0] * 5 + list(seconds))
    ]


def sample_lines(sample_at: Callable[[float], Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Samples as the sampler writes them, every quarter of a second."""
    return [
        {"at_seconds": STARTED_AT_SECONDS + tick / 4, **sample_at(tick / 4)} for tick in range(64)
    ]


@cache
def plain_trial(repeat: int = 0) -> TrialResult:
    """`ddp` on two ranks, whose windows are 7.5 to 10.25 and 10.75 to 14.25 s after its start."""
    return invented_trial(repeat=repeat, metrics={METRIC: 100.0})


def findings(
    steps: Iterable[float] = (), sample_at: Callable[[float], Mapping[str, Any]] = lambda _: {}
) -> tuple[StabilityFinding, ...]:
    return stability_of_trial(plain_trial().ranks, step_lines(steps), sample_lines(sample_at))


def measured(
    *steps: Iterable[float], sample_at: Callable[[float], Mapping[str, Any]] = lambda _: {}
) -> Comparison:
    """A repeat for each series of steps, with what is found in such raw files."""
    trials = [
        plain_trial(repeat).model_copy(update={"stability": findings(each, sample_at)})
        for repeat, each in enumerate(steps or [[]])
    ]
    return compare_trials(*trials)


def with_rates(rates: Mapping[str, Iterable[float]]) -> Comparison:
    """Strategy -> throughput of each repeat; no raw files."""
    values = {strategy: dict(enumerate(each)) for strategy, each in rates.items()}
    rows = [replace(shell(name, len(v)), values={METRIC: v}) for name, v in values.items()]
    return replace(compare([]), rows=tuple(rows))


@cache
def shell(strategy: str, repeats: int) -> Row:
    """A row to be filled, made once: its trials are costly to check."""
    trials = [invented_trial(strategy, 2, repeat) for repeat in range(repeats)]
    (row,) = rows_of([StoredRun(path=Path("run"), trials=tuple(trials))])
    return replace(row, folder=None)


def kinds(comparison: Comparison) -> list[Kind]:
    return [warning.kind for warning in warnings_of(comparison)]


def only(comparison: Comparison) -> Instability:
    (warning,) = warnings_of(comparison)
    assert warning.remedy
    return warning


def quiet_steps(draw: random.Random, count: int = 100, spread: float = 0.05) -> list[float]:
    """Skewed, each step a little like the one before it."""
    noise = 0.0
    seconds = []
    for _ in range(count):
        noise = 0.3 * noise + draw.gauss(0, spread)
        seconds.append(0.2 * math.exp(noise))
    return seconds


@pytest.mark.parametrize("spread", [0.02, 0.1])
def test_quiet_steps_raise_no_alarm(spread: float) -> None:
    """The promise is at most a false alarm in a hundred comparisons; each test has forty trials."""
    draw = random.Random(1)
    for _ in range(40):
        told = findings(quiet_steps(draw, spread=spread))
        assert all((finding.p_value or 0) * 40 > FALSE_ALARM_RATE for finding in told)


@pytest.mark.parametrize(("share", "factor"), [(0.2, 10.0), (0.5, 0.5), (0.85, 10.0), (0.85, 0.5)])
def test_a_lasting_change_is_named_with_its_step(share: float, factor: float) -> None:
    """A link becomes slower, early or late, in a single one of thirty trials."""
    steps = quiet_steps(random.Random(2), count=60)
    first = round(share * 60)
    told = findings([each * (factor if step >= first else 1) for step, each in enumerate(steps)])
    finding = next(each for each in told if each.kind is Kind.TRIAL_DRIFT)
    assert present(finding.p_value) * 30 <= FALSE_ALARM_RATE
    # Five steps of warm-up come before those that are measured.
    assert finding.text.endswith(f"and stayed so, from about step {5 + first} on")
    assert f" times {'longer' if factor > 1 else 'shorter'}" in finding.text


def test_drifts_and_pauses_are_no_lasting_change() -> None:
    """A steady growth has no moment of change, and neither has a pause."""
    line = [(float(at), float(at)) for at in range(40)]
    assert jump_of(line) is None
    assert jump_of([(at, 5.0 if 10 <= at < 30 else 1.0 + at / 100) for at, _ in line]) is None
    assert jump_of(line[:3]) is None
    jump = present(jump_of([(at, 5.0 if at >= 30 else 1.0 + at / 100) for at, _ in line]))
    assert jump.time == 30.0
    # A value in which it changed is of neither side.
    noisy = [(at, 3.0 if at == 20 else (1.0 if at < 20 else 4.7) + at % 2 * 0.3) for at, _ in line]
    between = present(jump_of(noisy))
    assert between.time == 21.0
    orders = [2 / math.comb(n, split) for n in (40, 39) for split in range(10, n - 9)]
    assert jump.p_value == pytest.approx(sum(orders))


@pytest.mark.parametrize("repeats", [2, 5])
def test_quiet_repeats_raise_few_alarms(repeats: int) -> None:
    """The rate of each kind is at most the promised one and three standard errors of it."""
    draw = random.Random(repeats)
    runs = 100
    alarms = 0
    for _ in range(runs):
        rates = {
            f"strategy-{index}": [100 * draw.lognormvariate(0, 0.05) for _ in range(repeats)]
            for index in range(8)
        }
        alarms += bool(kinds(with_rates(rates)))
    promised = 2 * FALSE_ALARM_RATE
    assert alarms / runs <= promised + 3 * math.sqrt(promised * (1 - promised) / runs)


@pytest.mark.parametrize(("last", "direction"), [(1.3, "30 % longer"), (0.8, "20 % shorter")])
def test_drift_within_a_trial_is_reported(last: float, direction: str) -> None:
    steps = quiet_steps(random.Random(2), spread=0.001)
    warning = only(measured([each * last ** (index / 99) for index, each in enumerate(steps)]))
    assert (warning.kind, warning.place) == (Kind.TRIAL_DRIFT, "ddp on 2 ranks, repeat 1")
    assert direction in warning.text


@pytest.mark.parametrize(
    ("last", "warnings"),
    [
        ((1.3, 1, 1), 0),
        ((1.3, 1.25, 1), 2),
        ((1.3, 1), 1),
        ((1.7, 1, 1), 0),
        ((2.3, 1, 1), 1),
        ((1, 1, 1), 0),
    ],
    ids=["one of three", "most", "one of two", "still slight", "a large one", "none"],
)
def test_a_slight_drift_counts_where_most_repeats_have_it(
    last: tuple[float, ...], warnings: int
) -> None:
    steps = quiet_steps(random.Random(2), spread=0.001)
    series = [[s * end ** (at / 99) for at, s in enumerate(steps)] for end in last]
    assert kinds(measured(*series)) == [Kind.TRIAL_DRIFT] * warnings


@pytest.mark.parametrize(
    "steps",
    [
        [0.2 * (1 + 0.03 * index / 99) for index in range(100)],
        [1.0 + step for step in range(11)],
        [0.2] * 50 + [0.5] + [0.2] * 49,
    ],
    ids=["a sure drift, but small", "too few to tell", "one slow step of many"],
)
def test_small_changes_are_not_reported(steps: list[float]) -> None:
    assert findings(steps) == ()


def test_slow_steps_have_one_line_in_the_notes() -> None:
    """The worst trial, how many more, and the remedy; the others are in the warnings."""
    draw = random.Random(6)
    series = [[0.2] * 95 + [draw.uniform(1, 2) for _ in range(5)] for _ in range(3)]
    for steps in series:
        draw.shuffle(steps)
    comparison = measured(*series, sample_at=cpu(1.6))
    worst, *others = [each for each in warnings_of(comparison) if each.kind is Kind.SLOW_STEPS]
    assert len(others) == 2
    assert worst.text.startswith("5 of 100 steps took over 2 times the median")
    unstable = [note.text for note in notes_of(comparison) if note.kind is NoteKind.UNSTABLE]
    assert len(unstable) == 2
    assert unstable[0].startswith(f"Unstable: {worst.place}: {worst.text} (2 more such signs)")
    assert unstable[0].endswith(f"{worst.remedy}.")


def test_drift_over_repeats_and_outlying_repeats_are_reported() -> None:
    draw = random.Random(4)

    def rates(factors: tuple[float, ...]) -> list[float]:
        return [100 * factor * draw.lognormvariate(0, 0.01) for factor in factors]

    drifting = {f"strategy-{index}": rates((1, 0.95, 0.9)) for index in range(8)}
    warning = only(with_rates(drifting))
    assert (warning.kind, warning.place) == (Kind.RUN_DRIFT, "invented")
    assert "10 % slower" in warning.text
    quiet = {f"strategy-{index}": rates((1, 1, 1)) for index in range(8)}
    warning = only(with_rates(quiet | {"strategy-2": rates((1, 0.7, 1))}))
    assert (warning.kind, warning.place) == (
        Kind.OUTLYING_REPEAT,
        "strategy-2 on 2 ranks, repeat 2",
    )
    assert warning.text.startswith(("29 %", "30 %", "31 %"))
    assert kinds(with_rates({"ddp": [100.0, 115.0, 90.0]})) == [], "nobody tells the odd one of 3"


def cpu(others_cores: float, **counters: float) -> Callable[[float], dict[str, Any]]:
    """Two ranks use a core each of four, others so many; further counters rise at that rate."""

    def sample_at(at: float) -> dict[str, Any]:
        machine = {"cpu_seconds": 1000 + (2 + others_cores) * at, "cores": 4}
        return {
            "machine": machine | {name: 5 + rate * at for name, rate in counters.items()},
            "ranks": [{"rank": rank, "pid": 4000 + rank, "cpu_seconds": at} for rank in (0, 1)],
            "gpus": [],
        }

    return sample_at


@pytest.mark.parametrize(
    ("sample_at", "kind", "said"),
    [
        (cpu(1.6), Kind.OTHER_PROCESSES, "other programs used 40 % of the CPU"),
        (cpu(0.92, cpu_pressure_seconds=0.4), Kind.OTHER_PROCESSES, "used 23 % of the CPU"),
        (
            lambda at: cpu(1.6)(at) | ({"ranks": []} if at > 13.6 else {}),  # its ranks ended
            Kind.OTHER_PROCESSES,
            "other programs used 40 % of the CPU",
        ),
        (cpu(0.0, memory_pressure_seconds=0.3), Kind.MEMORY_PRESSURE, "30 % of the time"),
        (cpu(0.0, throttled_seconds=0.5), Kind.SLOWED_DEVICE, "heat slowed the CPU down"),
    ],
)
def test_use_by_other_programs_marks_a_trial(
    sample_at: Callable[[float], Mapping[str, Any]], kind: Kind, said: str
) -> None:
    comparison = measured(sample_at=sample_at)
    warning = only(comparison)
    assert warning.kind is kind
    assert said in warning.text
    assert comparison.rows[0].disturbed == warning.text


def test_trial_whose_sampling_ended_early_is_reported() -> None:
    def stopped(at: float) -> dict[str, Any]:
        return {"failure": "OSError: no more"} if at > 14.5 else cpu(0.0)(at)

    warning = only(measured(sample_at=stopped))
    assert warning.kind is Kind.UNWATCHED
    assert "OSError: no more" in warning.text


@pytest.mark.parametrize(
    "sample_at",
    [
        cpu(1.6, cpu_pressure_seconds=0.05),
        cpu(0.9),
        cpu(0.3, cpu_pressure_seconds=0.9),
        lambda at: cpu(0.1 if at < 14.5 else 400.0)(at),
        lambda _at: {},
        lambda at: cpu(2.0)(at) | {"machine": None},
        lambda at: cpu(2.0)(at) | {"ranks": []},
        lambda at: cpu(2.0)(at) if at < 9 else {},
        lambda _at: {"machine": {"cpu_seconds": "much"}, "ranks": 3, "gpus": None},
    ],
    ids=[
        *("nobody waited", "room for all", "the ranks wait for one another"),
        *("others outside the windows", "no samples", "no counter", "no rank", "ends early"),
        "not what was asked for",
    ],
)
def test_harmless_samples_mark_no_trial(
    sample_at: Callable[[float], Mapping[str, Any]],
) -> None:
    comparison = measured(sample_at=sample_at)
    assert kinds(comparison) == []
    assert comparison.rows[0].disturbed is None


@pytest.mark.parametrize(
    ("machines", "names", "kernel", "share"),
    [(1, 1, None, 40), (2, 2, None, 75), (2, 1, None, None), (1, 2, "same", 40)],
)
def test_other_programs_are_measured_on_each_machine(
    machines: int, names: int, kernel: str | None, share: int | None
) -> None:
    """Each machine has a counter of its own; containers of one machine read the same one."""
    trial = invented_trial()
    ranks = tuple(
        rank.model_copy(
            update={"node": rank.rank, "host": f"host-{rank.rank % names}", "kernel": kernel}
        )
        for rank in trial.ranks
    )
    lines: list[dict[str, Any]] = []
    for line in sample_lines(cpu(1.6 if machines == 1 else 2.0)):
        for node, own in enumerate(line["ranks"]):
            of_node = {**line, "node": node, "ranks": [own]}
            if machines == 2 and node == 0:
                calm = {"cpu_seconds": 90_000.0 + own["cpu_seconds"], "cores": 4}
                of_node["machine"] = calm
            lines.append(of_node)
    texts = [finding.text for finding in stability_of_trial(ranks, [], lines)]
    assert texts == ([f"other programs used {share} % of the CPU"] if share else [])


def test_other_processes_on_a_device_are_reported() -> None:
    def sample_at(at: float) -> dict[str, Any]:
        return {"gpus": [{"uuid": "GPU-a", "other_processes": 2 if at > 9 else 0}]}

    warning = only(measured(sample_at=sample_at))
    assert (warning.kind, warning.severity > 0.5) == (Kind.SHARED_DEVICE, True)
    assert warning.text == "2 other processes ran on GPU-a"


def test_throttled_device_is_reported() -> None:
    def sample_at(at: float) -> dict[str, Any]:
        hot = {"uuid": "GPU-a", "clock_limits": 0x40 | 0x4 if at > 12 else 0x4}
        busy = {"uuid": "GPU-b", "clock_limits": 0x4, "temperature_celsius": 60}
        return {"gpus": [hot | {"temperature_celsius": 70 + at}, busy]}

    warning = only(measured(sample_at=sample_at))
    assert warning.kind is Kind.SLOWED_DEVICE
    share = sum(12 < 7.5 + tick / 4 <= 14.25 for tick in range(28)) / 27
    assert warning.text == (
        f"GPU-a was slowed down in {100 * share:.0f} % of the samples"
        " (too hot, by the hardware, at most 86 °C)"
    )


def test_long_files_are_read_in_even_parts(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(20_000)))
    steps = [int(str(line["step"])) for line in raw_lines(path, max_bytes=6_400)]
    assert len(steps) < 600
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (0, 19_999)
    gaps = [late - early for early, late in pairwise(steps) if late > early + 1]
    assert len(gaps) == 15
    assert max(gaps) < 1600


def test_trend_is_senss_slope_and_kendalls_test() -> None:
    rising = [(float(time), 3.0 * time) for time in range(10)]
    trend = present(trend_of([[*rising[:4], (4.0, 1e6), *rising[5:]]]))
    assert trend.slope == pytest.approx(3.0)
    shared = trend_of([[(0.0, level), (1.0, level + 1)] for level in (5.0, 90.0, 1.0, 20.0)])
    assert shared is not None
    assert shared.slope == pytest.approx(1.0)
    assert shared.p_value == pytest.approx(2 * 0.0668, abs=1e-4)  # (4 - 1) / sqrt(4) = 1.5
    assert trend_of([[(0.0, 1.0)], []]) is None
