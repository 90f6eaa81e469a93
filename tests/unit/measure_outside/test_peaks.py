"""Peaks are dense, come from exact names, and are never guessed."""

from __future__ import annotations

import pytest

from shardmark.core.peaks import PEAK_BY_NAME, PEAKS, peak_flops_per_second


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "expected"),
    [
        ("NVIDIA H200", "bf16", False, 989.5e12),
        ("NVIDIA A100-SXM4-80GB", "fp16", False, 312e12),
        ("NVIDIA A100 80GB PCIe", "fp32", False, 19.5e12),
        ("NVIDIA A100 80GB PCIe", "fp32", True, 156e12),
        ("NVIDIA A100 80GB PCIe", "bf16", True, 312e12),
        ("Tesla T4", "fp32", True, 8.1e12),  # the switch does nothing there
        ("NVIDIA GeForce RTX 4090", "bf16", False, 165.2e12),
        ("NVIDIA L40", "bf16", False, 181.05e12),
        ("NVIDIA GB200", "fp32", True, 1250e12),
        ("NVIDIA GH200 480GB", "bf16", False, 989.5e12),
    ],
)
def test_known(name: str, precision: str, tf32: bool, expected: float) -> None:
    flops, source = peak_flops_per_second(name, precision, tf32=tf32)
    assert flops == pytest.approx(expected)
    assert "NVIDIA" in source


def test_unknown_name_borrows_from_no_other() -> None:
    flops, reason = peak_flops_per_second("NVIDIA H20", "bf16")
    assert flops is None
    assert reason == "the peak of 'NVIDIA H20' is not in the table"


def test_precision_that_the_hardware_lacks() -> None:
    flops, reason = peak_flops_per_second("Tesla T4", "bf16")
    assert flops is None
    assert reason == "'Tesla T4' has no bf16 in hardware"


def test_rows_are_plausible() -> None:
    assert len(PEAK_BY_NAME) == sum(len(peak.names.split("|")) for peak in PEAKS)  # no name twice
    for peak in PEAKS:
        assert peak.source
        assert peak.fp16 is not None
        assert peak.fp16 > peak.fp32
        if peak.bf16 is not None:
            assert peak.bf16 == peak.fp16
            assert peak.tf32 is not None
            assert peak.tf32 == pytest.approx(peak.bf16 / 2, rel=0.025)
