"""Peaks are dense, come from exact names, and are never guessed."""

from __future__ import annotations

import pytest

from shardmark.base.peaks import PEAK_BY_NAME, PEAKS, peak_flops_per_second


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "expected"),
    [
        ("NVIDIA H200", "bf16", False, 989.5e12),
        ("NVIDIA A100 80GB PCIe", "fp32", False, 19.5e12),
        ("NVIDIA A100 80GB PCIe", "fp32", True, 156e12),
        ("NVIDIA A100 80GB PCIe", "bf16", True, 312e12),
        ("Tesla T4", "fp32", True, 8.1e12),  # the switch does nothing there
        ("NVIDIA GeForce RTX 4090", "fp16", False, 165.2e12),
        ("Tesla T4", "bf16", False, "has no bf16 in hardware"),
        ("NVIDIA H20", "bf16", False, "'NVIDIA H20' is not in the table"),  # borrows from no other
    ],
)
def test_peak_is_a_number_or_a_reason(
    name: str, precision: str, tf32: bool, expected: float | str
) -> None:
    flops, told = peak_flops_per_second(name, precision, tf32=tf32)
    if isinstance(expected, str):
        assert flops is None
        assert expected in told
    else:
        assert flops == pytest.approx(expected)
        assert "NVIDIA" in told


def test_rows_are_plausible() -> None:
    assert len(PEAK_BY_NAME) == sum(len(peak.names.split("|")) for peak in PEAKS)  # no name twice
    for peak in PEAKS:
        assert peak.source
        assert peak.fp16 > peak.fp32
        if peak.bf16 is not None:
            assert peak.bf16 == peak.fp16
            assert peak.tf32 == pytest.approx(peak.bf16 / 2, rel=0.025)
