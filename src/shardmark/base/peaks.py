"""Dense peak FLOP/s of GPUs by name and precision: the denominator of MFU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Peak:
    """Peaks of a GPU model in 10^12 FLOP/s without 2:4 sparsity; None: not in hardware."""

    names: str
    """Names that NVML and torch report, separated by `|`; drivers before 455 omit `NVIDIA`."""
    fp32: float
    """Peak of the ordinary cores; `tf32` is that of the tensor cores."""
    tf32: float | None
    bf16: float | None
    """Peak with fp32 accumulation, as for fp16."""
    fp16: float
    source: str
    """Source of the figures, which are halved if it lists only those with sparsity."""
    fp8: float | None = None
    """Peak with fp32 accumulation."""


PEAKS = (
    Peak(
        "NVIDIA A100-SXM4-40GB|NVIDIA A100-SXM4-80GB|NVIDIA A100-PCIE-40GB|NVIDIA A100 80GB PCIe"
        "|A100-SXM4-40GB|A100-SXM4-80GB|A100-PCIE-40GB",
        *(19.5, 156, 312, 312),
        "NVIDIA A100 data sheet",
    ),
    Peak("NVIDIA A10", 31.2, 62.5, 125, 125, "NVIDIA A10 data sheet"),
    Peak("NVIDIA A30", 10.3, 82, 165, 165, "NVIDIA A30 data sheet"),
    Peak("NVIDIA A40", 37.4, 74.8, 149.7, 149.7, "NVIDIA A40 data sheet"),
    Peak("NVIDIA A10G|A10G", 35, 35, 70, 70, "NVIDIA A10G data sheet (AWS edition)"),
    Peak(
        "NVIDIA RTX A6000|RTX A6000",
        *(38.7, 77.4, 154.8, 154.8),
        "NVIDIA Ampere GA102 white paper, appendix on the RTX A6000",
    ),
    Peak(
        "Tesla V100-SXM2-16GB|Tesla V100-SXM2-32GB",
        *(15.7, None, None, 125),
        "NVIDIA V100 data sheet, SXM2",
    ),
    Peak(
        "Tesla V100-PCIE-16GB|Tesla V100-PCIE-32GB",
        *(14, None, None, 112),
        "NVIDIA V100 data sheet, PCIe",
    ),
    Peak("Tesla V100S-PCIE-32GB", 16.4, None, None, 130, "NVIDIA V100 data sheet, V100S PCIe"),
    Peak("Tesla T4|NVIDIA T4", 8.1, None, None, 65, "NVIDIA T4 data sheet"),
    Peak("NVIDIA L4", 30.3, 60, 121, 121, "NVIDIA L4 data sheet", 242),
    Peak("NVIDIA L40", 90.5, 90.5, 181.05, 181.05, "NVIDIA L40 data sheet", 362),
    Peak("NVIDIA L40S", 91.6, 183, 362.05, 362.05, "NVIDIA L40S data sheet", 733),
    Peak("NVIDIA H100 80GB HBM3", 67, 494.5, 989.5, 989.5, "NVIDIA H100 data sheet, SXM", 1979),
    Peak("NVIDIA H100 PCIe", 51, 378, 756.5, 756.5, "NVIDIA H100 data sheet, PCIe", 1513),
    Peak("NVIDIA H100 NVL", 60, 417.5, 835.5, 835.5, "NVIDIA H100 data sheet, NVL", 1671),
    Peak("NVIDIA H800", 67, 494.5, 989.5, 989.5, "NVIDIA H800 data sheet, SXM", 1979),
    Peak(
        "NVIDIA GH200 480GB|NVIDIA GH200 120GB",
        *(67, 494.5, 989.5, 989.5),
        "NVIDIA GH200 Grace Hopper data sheet",
        1979,
    ),
    Peak("NVIDIA H200", 67, 494.5, 989.5, 989.5, "NVIDIA H200 data sheet, SXM", 1979),
    Peak("NVIDIA H200 NVL", 60, 417.5, 835.5, 835.5, "NVIDIA H200 data sheet, NVL", 1671),
    Peak(
        "NVIDIA B200", 75, 1100, 2250, 2250, "NVIDIA HGX B200 data sheet, one of eight GPUs", 4500
    ),
    Peak(
        "NVIDIA GB200", 80, 1250, 2500, 2500, "NVIDIA GB200 NVL72 data sheet, one of 72 GPUs", 5000
    ),
    Peak(
        "NVIDIA B300 SXM6 AC",
        *(75, 1125, 2250, 2250),
        "NVIDIA HGX B300 data sheet, one of eight GPUs",
        4500,
    ),
    Peak(
        "NVIDIA GeForce RTX 3090|GeForce RTX 3090",
        *(35.6, 35.6, 71, 71),
        "NVIDIA Ampere GA102 white paper",
    ),
    Peak("NVIDIA GeForce RTX 4090", 82.6, 82.6, 165.2, 165.2, "NVIDIA Ada white paper", 330.3),
    Peak(
        "NVIDIA GeForce RTX 5090",
        *(104.8, 104.8, 209.5, 209.5),
        "NVIDIA RTX Blackwell white paper",
        419,
    ),
)

PEAK_BY_NAME: Mapping[str, Peak] = MappingProxyType(
    {name: peak for peak in PEAKS for name in peak.names.split("|")}
)


def peak_flops_per_second(
    device_name: str, precision: str, *, tf32: bool = False
) -> tuple[float | None, str]:
    """Return the dense peak and its source, or None and the reason why it is unknown.

    `precision` is `fp32`, `bf16`, `fp16` or `fp8`.  `tf32` allows TensorFloat-32 in fp32
    products; it has no effect on hardware without it.
    """
    peak = PEAK_BY_NAME.get(device_name)
    if peak is None:
        return None, f"the peak of {device_name!r} is not in the table"
    by_precision = {
        **{"fp32": (tf32 and peak.tf32) or peak.fp32, "bf16": peak.bf16, "fp16": peak.fp16},
        "fp8": peak.fp8,
    }
    tera = by_precision[precision]
    if tera is None:
        return None, f"{device_name!r} has no {precision} in hardware"
    return 1e12 * tera, peak.source
