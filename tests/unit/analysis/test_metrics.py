"""The catalogue is complete, and its units are base units."""

from __future__ import annotations

import re

from shardmark.core.metrics import METRICS

CONTRACT = """
startup_seconds epoch_seconds step_seconds data_seconds forward_seconds backward_seconds
optimizer_seconds exposed_communication_seconds evaluation_seconds total_seconds
samples_per_second samples_per_second_per_rank model_flops_per_second mfu speedup scaling_efficiency
peak_memory_bytes peak_reserved_bytes parameter_bytes gradient_bytes optimizer_state_bytes
activation_peak_bytes peak_rss_bytes device_used_bytes
collective_calls collective_bytes network_sent_bytes network_received_bytes network_bytes_per_second
cpu_percent threads processes open_files context_switches
gpu_utilization power_watts energy_joules temperature_celsius
train_loss validation_loss accuracy_top1 accuracy_top5
map map_50 map_75 mask_map mask_map_50 mask_map_75
nonfinite_steps skipped_steps data_errors restarts
"""
UNITS = {"seconds": "seconds", "bytes": "bytes", "watts": "watts", "joules": "joules"}


def test_has_every_metric_of_the_contract() -> None:
    assert set(CONTRACT.split()) <= set(METRICS)


def test_is_defined() -> None:
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.source
        assert metric.unit, name
        assert re.fullmatch(r"[0-9A-Za-z].*[.]", metric.definition)
        for suffix, unit in UNITS.items():
            if metric.name.endswith(f"_{suffix}"):
                assert metric.unit.split("/")[0] == unit
