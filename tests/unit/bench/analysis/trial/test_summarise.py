"""Each metric is what the catalogue says it is, and each that is missing has its reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardmark.base.metrics import METRICS, TRIAL_METRICS
from shardmark.base.results.schema import ProbeRecord, RankRecord
from shardmark.bench.analysis.trial.sampled_metrics import Windows, counter_increase, levels
from shardmark.ranks.strategies import build_strategy
from tests.unit.bench.analysis.trial.trials import (
    epochs,
    probe,
    record,
    sample_lines,
    server_record,
    step_lines,
    summarised,
    value,
)

OF_DETECTORS = {"map", "map_50", "map_75", "mask_map", "mask_map_50", "mask_map_75"}
OF_LANGUAGE = {"tokens_per_second", "tokens_per_second_per_rank", "bits_per_byte", "perplexity"}
NOT_OF_IT = {"accuracy_top5"} | OF_DETECTORS | OF_LANGUAGE
"""Metrics that the evaluation of `trials` does not have."""
OF_COMPILING = {"compile_seconds", "recompilations"}
OF_SERVERS = {metric.name for metric in METRICS.values() if metric.group == "servers"}


VALUES = {
    "startup_seconds": 6.0,
    "step_seconds": 1.1 * 3.5,
    "step_seconds_p95": 1.1 * np.quantile(range(1, 7), 0.95),
    "step_seconds_p99": 1.1 * np.quantile(range(1, 7), 0.99),
    "data_seconds": 0.125,
    "forward_seconds": 0.25,
    "backward_seconds": 0.5,
    "optimizer_seconds": 0.0625,
    "exposed_communication_seconds": 0.25,
    "epoch_seconds": 6.6,
    "evaluation_seconds": 2.0,
    "total_seconds": 60.0,
    "measured_steps": 6,
    "samples_per_second": 20.0,
    "samples_per_second_per_rank": 10.0,
    "model_flops_per_second": 20e9,
    "peak_memory_bytes": 1000,
    "parameter_bytes": 100,
    "gradient_bytes": 100,
    "optimizer_state_bytes": 300,
    "activation_peak_bytes": 600,
    "peak_rss_bytes": 2500,
    "collective_calls": 4,
    "collective_bytes": 310,
    "network_sent_bytes": 6.6 * 110,
    "network_received_bytes": 6.6 * 1100,
    "network_bytes_per_second": 110,
    "cpu_percent": 75,
    "threads": 5,
    "processes": 3,
    "open_files": 20,
    "context_switches": 132,
    "train_loss": 1.5,
    "validation_loss": 1.25,
    "accuracy_top1": 0.5,
    "nonfinite_steps": 0,
    "skipped_steps": 0,
    "data_errors": 0,
}


def test_metrics_have_the_values_of_their_definitions() -> None:
    metrics, missing = summarised()
    assert {name: value(metrics, name) for name in VALUES} == pytest.approx(VALUES)
    assert not VALUES.keys() & missing


def test_metrics_are_those_of_the_catalogue() -> None:
    metrics, missing = summarised()
    assert set(metrics) == set(METRICS) - {
        "parameters",
        "speedup",
        "scaling_efficiency",
        "memory_ratio",
    }
    assert tuple(metrics) == TRIAL_METRICS
    assert {name for name, summary in metrics.items() if summary is None} == set(missing)
    for name, summary in metrics.items():
        assert summary is None or summary.over == METRICS[name].over


def test_metrics_of_gpus_are_missing_on_a_cpu() -> None:
    _, missing = summarised()
    on_cpu = {
        "mfu",
        "hfu",
        "peak_reserved_bytes",
        "host_state_bytes",
        "device_used_bytes",
        "gpu_utilization",
        "power_watts",
        "energy_joules",
        "temperature_celsius",
    }
    assert missing == {
        **dict.fromkeys(on_cpu, "the device is a CPU"),
        **dict.fromkeys(NOT_OF_IT, "the workload has no such metric"),
        **dict.fromkeys(OF_SERVERS, "the strategy has no parameter server"),
        "pipeline_bubble_fraction": "the strategy has no pipeline",
        **dict.fromkeys(OF_COMPILING, "recipe.compile is none"),
    }


def test_a_bubble_is_what_the_passes_leave_of_their_time() -> None:
    steps = [line | {"pipeline_seconds": 1.0} for line in step_lines()]
    assert value(summarised(steps=steps)[0], "pipeline_bubble_fraction") == pytest.approx(0.25)


def test_the_mean_goes_with_maximum_and_imbalance() -> None:
    cpu = summarised()[0]["cpu_percent"]
    assert cpu is not None
    assert cpu.over == "mean"
    assert (cpu.mean, cpu.maximum, cpu.imbalance) == pytest.approx((75, 100, 1 / 3))


def test_metrics_of_gpus_have_values() -> None:
    ranks = [
        record(
            rank,
            device="NVIDIA H200",
            device_uuids=(f"GPU-{rank}",),
            peak_memory_bytes=5000,
            peak_reserved_bytes=6000 + rank,
        )
        for rank in range(2)
    ]
    metrics, missing = summarised(
        ranks,
        samples=sample_lines(gpus=["GPU-0", "GPU-1"]),
        device_type="cuda",
        precision="bf16",
    )
    assert value(metrics, "mfu") == pytest.approx(20e9 / (2 * 989.5e12))
    assert value(metrics, "hfu") == pytest.approx(26e9 / (2 * 989.5e12))
    assert value(metrics, "peak_memory_bytes") == 5000  # the allocator's, not the probe's
    assert value(metrics, "peak_reserved_bytes") == 6001
    assert value(metrics, "activation_peak_bytes") == 4600
    assert value(metrics, "gpu_utilization") == 80.5
    assert value(metrics, "power_watts") == pytest.approx(600)
    assert value(metrics, "energy_joules") == pytest.approx(600 * 6.6)
    assert value(metrics, "temperature_celsius") == 61  # hotter before the windows
    assert value(metrics, "device_used_bytes") == 10_000
    others = {"host_state_bytes", "pipeline_bubble_fraction"}
    assert set(missing) == NOT_OF_IT | OF_SERVERS | OF_COMPILING | others


def test_rates_and_energy_cover_all_devices_of_a_process() -> None:
    uuids = ("GPU-0", "GPU-1")
    ranks = [record(0, device="NVIDIA H200", device_uuids=uuids, peak_reserved_bytes=1)]
    metrics, _ = summarised(
        ranks,
        samples=sample_lines(ranks=1, gpus=uuids),
        device_type="cuda",
        tf32=True,
        layout=build_strategy("dp", {}).layout(2),
    )
    assert value(metrics, "mfu") == pytest.approx(11e9 / (2 * 494.5e12))
    assert value(metrics, "samples_per_second_per_rank") == pytest.approx(
        value(metrics, "samples_per_second") / 2
    )
    assert value(metrics, "energy_joules") == pytest.approx(2 * 300 * 6)


def test_shared_device_has_one_peak() -> None:
    ranks = [record(rank, device="NVIDIA H200", device_uuids=("GPU-0",)) for rank in range(2)]
    metrics, _ = summarised(ranks, device_type="cuda")
    assert value(metrics, "mfu") == pytest.approx(20e9 / 67e12)


def test_state_on_the_host_is_counted_separately() -> None:
    """A server on the CPU has the optimizer of workers on GPUs; these have something offloaded."""
    workers = [
        record(
            rank,
            device="NVIDIA H200",
            peak_memory_bytes=5000,
            probe=probe(rank).model_copy(update={"host_state_bytes": 40 + rank}),
        )
        for rank in range(2)
    ]
    held = ProbeRecord(
        parameter_bytes=10**6,
        gradient_bytes=10**6,
        optimizer_state_bytes=10**6,
        peak_memory_bytes=4 * 10**6,
    )
    server = record(2, role="server", windows=(), samples=0, probe=held)
    metrics, _ = summarised([*workers, server], device_type="cuda")
    assert value(metrics, "parameter_bytes") == 100
    assert value(metrics, "peak_memory_bytes") == 5000
    assert value(metrics, "host_state_bytes") == 3 * 10**6
    metrics, _ = summarised(workers, device_type="cuda")
    assert value(metrics, "host_state_bytes") == 41


def test_state_larger_than_the_peak_leaves_no_activations() -> None:
    small = probe(0).model_copy(update={"peak_memory_bytes": 50})
    metrics, _ = summarised([record(0, probe=small), record(1, probe=small)])
    assert value(metrics, "activation_peak_bytes") == 0


def test_training_of_warm_up_alone_has_no_rates() -> None:
    metrics, missing = summarised(
        [record(0, windows=()), record(1, windows=())], step_lines(steps=3)
    )
    reason = "all 3 steps that were taken are warm-up"
    for name in ("step_seconds", "samples_per_second", "mfu", "cpu_percent", "energy_joules"):
        assert missing[name] == reason
    assert value(metrics, "startup_seconds") == 6.0
    assert value(metrics, "train_loss") == 1.5


def test_missing_records_have_reasons() -> None:
    metrics, missing = summarised([], [], [])
    assert value(metrics, "total_seconds") == 60.0
    assert missing["step_seconds"] == "no rank left a record"
    assert missing["samples_per_second"] == "no rank that trains left a record"
    assert set(metrics) == set(TRIAL_METRICS)


def test_server_counts_where_it_has_values() -> None:
    server = server_record(2)
    metrics, missing = summarised([server, record(1), record(0)], samples=sample_lines(ranks=3))
    assert value(metrics, "samples_per_second") == pytest.approx(20)
    assert value(metrics, "samples_per_second_per_rank") == pytest.approx(10)
    assert value(metrics, "cpu_percent") == pytest.approx(100)
    assert value(metrics, "processes") == 6
    assert value(metrics, "parameter_bytes") == 100
    assert "startup_seconds" not in missing


def test_samples_of_another_process_are_ignored() -> None:
    lines: list[dict[str, Any]] = sample_lines()
    for line in lines:
        (rank, _) = line["ranks"]
        if line["at_seconds"] <= 1012:
            rank["pid"] = 999
    _, missing = summarised(samples=lines)
    assert missing["cpu_percent"] == "rank 0: no sample was taken before the first window"


def test_errors_are_counted() -> None:
    ranks = [
        record(0, nonfinite_steps=3, skipped_steps=1, data_errors=("a", "b")),
        record(1, nonfinite_steps=2, skipped_steps=1, data_errors=("c",)),
    ]
    metrics, _ = summarised(ranks)
    names = ("nonfinite_steps", "skipped_steps", "data_errors")
    assert [value(metrics, name) for name in names] == [3, 1, 3]


def test_network_is_the_sum_over_nodes() -> None:
    """Their interfaces have the same names, and counters of their own."""
    alone, _ = summarised()
    lines = [{"node": node, **line} for line in sample_lines() for node in (0, 1)]
    together, _ = summarised(samples=lines)
    for name in ("network_sent_bytes", "network_received_bytes", "network_bytes_per_second"):
        assert value(together, name) == pytest.approx(2 * value(alone, name))


def test_nvlink_is_counted_from_when_the_devices_are_known() -> None:
    lines: list[dict[str, Any]] = sample_lines()
    for second, line in enumerate(lines[1:]):
        line["network"]["nvlink"] = {"bytes_sent": 10**9 + 50 * second, "bytes_received": 0}
    metrics, _ = summarised(samples=lines)
    assert value(metrics, "network_sent_bytes") == pytest.approx(6.6 * (110 + 50))


NO_PROBE = "no untimed steps were taken after the training: the probe was switched off"
NO_EVALUATION = "the validation set was not evaluated"
TOO_MANY = probe(0).model_copy(update={"flops_per_sample": 10**15})
FAILED_PROBE = ProbeRecord(reasons={"flops_per_sample": "the model has its own operator"})
UNREPORTED: list[dict[str, Any]] = sample_lines(gpus=["GPU-0"])
for _line in UNREPORTED:
    _line["gpus"][0].update(energy_joules=None, utilization_percent=None)
UNMARKED = [{k: v for k, v in line.items() if k != "forward_seconds"} for line in step_lines()]


def both(**changes: Any) -> list[RankRecord]:
    return [record(0, **changes), record(1, **changes)]


@pytest.mark.parametrize(
    ("given", "reasons"),
    [
        (
            {"ranks": [record(0), record(1, probe=None)]},
            {
                **dict.fromkeys(("parameter_bytes", "gradient_bytes"), NO_PROBE),
                **dict.fromkeys(("optimizer_state_bytes", "activation_peak_bytes"), NO_PROBE),
                **dict.fromkeys(("peak_memory_bytes", "collective_calls"), NO_PROBE),
                **dict.fromkeys(("collective_bytes", "exposed_communication_seconds"), NO_PROBE),
            },
        ),
        (
            {"ranks": both(probe=FAILED_PROBE)},
            {
                "model_flops_per_second": "the model has its own operator",
                "parameter_bytes": "the untimed steps after the training could not count it",
            },
        ),
        (
            {"steps_per_epoch": 11},
            {"epoch_seconds": "10 steps were taken, fewer than one epoch (11 steps)"},
        ),
        (
            {"steps_per_epoch": None},
            {"epoch_seconds": "the number of steps in one epoch is not known"},
        ),
        (
            {"ranks": [record(0), record(1, windows=())]},
            {"samples_per_second": "no window was measured on rank 1"},
        ),
        ({"steps": UNMARKED}, {"forward_seconds": "rank 0 marked no forward span"}),
        (
            {"ranks": [record(0), record(1, first_step_at_seconds=None)]},
            {"startup_seconds": "rank 1 took no step"},
        ),
        (
            {"samples": sample_lines()[:22]},
            {
                "network_sent_bytes": "no sample was taken after the last window",
                "cpu_percent": "rank 0: no sample was taken after the last window",
            },
        ),
        (
            {"samples": sample_lines()[11:]},
            {"network_sent_bytes": "no sample was taken before the first window"},
        ),
        ({"samples": []}, {"network_sent_bytes": "no sample was taken"}),
        (
            {"samples": UNREPORTED, "device_type": "cuda"},
            {
                "energy_joules": "the device does not report energy_joules",
                "gpu_utilization": "the device does not report utilization_percent",
            },
        ),
        (  # an earlier process is not the rank
            {"ranks": [record(0, pid=999), record(1)]},
            {"threads": "rank 0: no sample was taken"},
        ),
        (
            {"ranks": both(epochs=epochs(None), evaluation_seconds=())},
            dict.fromkeys(("evaluation_seconds", "validation_loss"), NO_EVALUATION),
        ),
        (
            {"ranks": both(epochs=epochs({"validation_loss": None}))},
            {"validation_loss": "the evaluation gave no finite number"},
        ),
        (
            {"ranks": both(device="NVIDIA H200", probe=TOO_MANY), "device_type": "cuda"},
            {"mfu": "more than the peak: the table's peak, or the count of operations, is wrong"},
        ),
        (
            {"ranks": both(device="NVIDIA X1"), "device_type": "cuda"},
            {
                "mfu": "the peak of 'NVIDIA X1' is not in the table",
                "power_watts": "NVML gave no sample of a device",
            },
        ),
    ],
)
def test_each_missing_metric_has_its_reason(given: dict[str, Any], reasons: dict[str, str]) -> None:
    metrics, missing = summarised(**given)
    assert {name: missing[name] for name in reasons} == reasons
    assert {name for name, summary in metrics.items() if summary is None} == set(missing)


POINTS = [(0.0, 0.0), (10.0, 100.0), (20.0, 100.0), (30.0, 400.0)]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        (((0.0, 30.0),), 400.0),
        (((5.0, 25.0),), 200.0),
        (((2.0, 4.0), (21.0, 22.0)), 50.0),
        (((12.0, 18.0),), 0.0),
        ((), "no window was measured"),
    ],
)
def test_counters_are_interpolated_to_the_windows(
    spans: tuple[tuple[float, float], ...], expected: float | str
) -> None:
    rise = counter_increase(POINTS, Windows(spans))
    assert rise == (expected if isinstance(expected, str) else pytest.approx(expected))


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        (((10.0, 20.0),), [100.0, 100.0]),
        (((1.0, 2.0),), [0.0, 100.0]),  # none within: the two around it
        (((1.0, 12.0), (21.0, 22.0)), [100.0, 100.0, 400.0]),
        (((31.0, 32.0),), [400.0]),
    ],
)
def test_levels_are_those_sampled_in_the_windows(
    spans: tuple[tuple[float, float], ...], expected: list[float]
) -> None:
    assert levels(POINTS, Windows(spans)) == expected
    assert levels([], Windows(spans)) == []
