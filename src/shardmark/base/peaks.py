"""Dense peak FLOP/s of GPUs by name and precision: the denominator of MFU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from shardmark.base.files.strict_yaml import parse_yaml


@dataclass(frozen=True, slots=True)
class Peak:
    """Peaks of a GPU by precision in 10^12 FLOP/s, as `peaks.yaml` has them; None: no hardware."""

    peaks: Mapping[str, float | None]
    source: str


@cache
def shipped() -> Mapping[str, Peak]:
    """Return the peaks of every device by each name that its drivers report."""
    text = files("shardmark.base").joinpath("peaks.yaml").read_text(encoding="utf-8")
    rows = parse_yaml(text, "peaks.yaml")
    return {name: Peak(row["peaks"], row["source"]) for row in rows for name in row["names"]}


def peak_flops_per_second(
    device_name: str, precision: str, *, tf32: bool = False
) -> tuple[float | None, str]:
    """Return the dense peak and its source, or None and the reason why it is unknown.

    `precision` is `fp32`, `bf16`, `fp16` or `fp8`.  `tf32` allows TensorFloat-32 in fp32
    products; it has no effect on hardware without it.
    """
    device = shipped().get(device_name)
    if device is None:
        return None, f"the peak of {device_name!r} is not in the table"
    tera = device.peaks[precision]
    if precision == "fp32" and tf32:
        tera = device.peaks["tf32"] or tera
    if tera is None:
        return None, f"{device_name!r} has no {precision} in hardware"
    return 1e12 * tera, device.source
