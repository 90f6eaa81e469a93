"""Peaks are dense, come from exact names, and are never guessed."""

from __future__ import annotations

from importlib.resources import files

import pytest

from shardmark.base.files.strict_yaml import parse_yaml
from shardmark.base.peaks import peak_flops_per_second, shipped


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
    rows = parse_yaml(files("shardmark.base").joinpath("peaks.yaml").read_text(), "peaks.yaml")
    assert len(shipped()) == sum(len(row["names"]) for row in rows)  # no name twice
    for device in shipped().values():
        assert device.source
        peaks = {precision: peak or 0 for precision, peak in device.peaks.items()}
        assert peaks["fp16"] > peaks["fp32"] > 0
        if peaks["bf16"]:
            assert peaks["bf16"] == peaks["fp16"]
            assert peaks["tf32"] == pytest.approx(peaks["bf16"] / 2, rel=0.025)
