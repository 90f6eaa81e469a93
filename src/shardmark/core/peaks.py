"""Dense peak FLOP/s of GPUs by name and precision: the denominator of MFU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

TERA = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """One model of GPU.  FLOP/s without 2:4 sparsity, sums kept in fp32; None: not in hardware.

    Where a data sheet gives only the sparse figure, this is half of it.
    """

    names: tuple[str, ...]
    """Exactly as NVML and torch report them; drivers before 455 left `NVIDIA` out."""
    fp32: float
    """On the ordinary cores; products on the tensor cores are `tf32`."""
    tf32: float | None
    bf16: float | None
    fp16: float | None
    source: str

    def of(self, precision: str) -> float | None:
        flops: dict[str, float | None] = {
            "fp32": self.fp32,
            "tf32": self.tf32,
            "bf16": self.bf16,
            "fp16": self.fp16,
        }
        return flops[precision]


PEAKS = (
    Peak(
        names=(
            "NVIDIA A100-SXM4-40GB",
            "NVIDIA A100-SXM4-80GB",
            "NVIDIA A100-PCIE-40GB",
            "NVIDIA A100 80GB PCIe",
            "A100-SXM4-40GB",
            "A100-SXM4-80GB",
            "A100-PCIE-40GB",
        ),
        fp32=19.5 * TERA,
        tf32=156 * TERA,
        bf16=312 * TERA,
        fp16=312 * TERA,
        source="NVIDIA A100 Tensor Core GPU data sheet",
    ),
    Peak(
        names=("NVIDIA A10G", "A10G"),
        fp32=35 * TERA,
        tf32=35 * TERA,
        bf16=70 * TERA,
        fp16=70 * TERA,
        source="NVIDIA A10G data sheet (AWS edition)",
    ),
    Peak(
        names=("NVIDIA RTX A6000", "RTX A6000"),
        fp32=38.7 * TERA,
        tf32=77.4 * TERA,
        bf16=154.8 * TERA,
        fp16=154.8 * TERA,
        source="NVIDIA Ampere GA102 GPU architecture white paper, appendix on the RTX A6000",
    ),
    Peak(
        names=(
            "Tesla V100-SXM2-16GB",
            "Tesla V100-SXM2-32GB",
        ),
        fp32=15.7 * TERA,
        tf32=None,
        bf16=None,
        fp16=125 * TERA,
        source="NVIDIA V100 Tensor Core GPU data sheet, SXM2",
    ),
    Peak(
        names=("Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB"),
        fp32=14 * TERA,
        tf32=None,
        bf16=None,
        fp16=112 * TERA,
        source="NVIDIA V100 Tensor Core GPU data sheet, PCIe",
    ),
    Peak(
        names=("Tesla V100S-PCIE-32GB",),
        fp32=16.4 * TERA,
        tf32=None,
        bf16=None,
        fp16=130 * TERA,
        source="NVIDIA V100 Tensor Core GPU data sheet, V100S PCIe",
    ),
    Peak(
        names=("Tesla T4", "NVIDIA T4"),
        fp32=8.1 * TERA,
        tf32=None,
        bf16=None,
        fp16=65 * TERA,
        source="NVIDIA T4 Tensor Core GPU data sheet",
    ),
    Peak(
        names=("NVIDIA L4",),
        fp32=30.3 * TERA,
        tf32=60 * TERA,
        bf16=121 * TERA,
        fp16=121 * TERA,
        source="NVIDIA L4 Tensor Core GPU data sheet (halved: with sparsity there)",
    ),
    Peak(
        names=("NVIDIA L40S",),
        fp32=91.6 * TERA,
        tf32=183 * TERA,
        bf16=362.05 * TERA,
        fp16=362.05 * TERA,
        source="NVIDIA L40S data sheet",
    ),
    Peak(
        names=("NVIDIA H100 80GB HBM3",),
        fp32=67 * TERA,
        tf32=494.5 * TERA,
        bf16=989.5 * TERA,
        fp16=989.5 * TERA,
        source="NVIDIA H100 Tensor Core GPU data sheet, SXM (halved: with sparsity there)",
    ),
    Peak(
        names=("NVIDIA H100 PCIe",),
        fp32=51 * TERA,
        tf32=378 * TERA,
        bf16=756.5 * TERA,
        fp16=756.5 * TERA,
        source="NVIDIA H100 Tensor Core GPU data sheet, PCIe (halved: with sparsity there)",
    ),
    Peak(
        names=("NVIDIA H100 NVL",),
        fp32=60 * TERA,
        tf32=417.5 * TERA,
        bf16=835.5 * TERA,
        fp16=835.5 * TERA,
        source="NVIDIA H100 Tensor Core GPU data sheet, NVL (halved: with sparsity there)",
    ),
    Peak(
        names=("NVIDIA H200",),
        fp32=67 * TERA,
        tf32=494.5 * TERA,
        bf16=989.5 * TERA,
        fp16=989.5 * TERA,
        source="NVIDIA H200 Tensor Core GPU data sheet, SXM (halved: with sparsity there)",
    ),
    Peak(
        names=("NVIDIA H200 NVL",),
        fp32=60 * TERA,
        tf32=417.5 * TERA,
        bf16=835.5 * TERA,
        fp16=835.5 * TERA,
        source="NVIDIA H200 Tensor Core GPU data sheet, NVL (halved: with sparsity there)",
    ),
    Peak(
        names=("NVIDIA B200",),
        fp32=75 * TERA,
        tf32=1100 * TERA,
        bf16=2250 * TERA,
        fp16=2250 * TERA,
        source="NVIDIA HGX B200 data sheet, one of eight GPUs (halved: with sparsity there)",
    ),
    Peak(
        names=("NVIDIA GeForce RTX 3090", "GeForce RTX 3090"),
        fp32=35.6 * TERA,
        tf32=35.6 * TERA,
        bf16=71 * TERA,
        fp16=71 * TERA,
        source="NVIDIA Ampere GA102 GPU architecture white paper, sums in fp32",
    ),
    Peak(
        names=("NVIDIA GeForce RTX 4090",),
        fp32=82.6 * TERA,
        tf32=82.6 * TERA,
        bf16=165.2 * TERA,
        fp16=165.2 * TERA,
        source="NVIDIA Ada GPU architecture white paper, sums in fp32",
    ),
)

PEAK_BY_NAME: Mapping[str, Peak] = MappingProxyType(
    {name: peak for peak in PEAKS for name in peak.names}
)


def peak_flops_per_second(
    device_name: str, precision: str, *, tf32: bool = False
) -> tuple[float | None, str]:
    """The dense peak and its source; or None and why it is not known.

    `precision` is `fp32`, `bf16` or `fp16`; `tf32` says that fp32 products may use TensorFloat-32,
    which hardware without it ignores.
    """
    peak = PEAK_BY_NAME.get(device_name)
    if peak is None:
        return None, f"the peak of {device_name!r} is not in the table"
    if precision == "fp32" and tf32 and peak.tf32 is not None:
        return peak.tf32, peak.source
    flops = peak.of(precision)
    if flops is None:
        return None, f"{device_name!r} has no {precision} in hardware"
    return flops, peak.source
