"""Properties of a machine on which strategies decide whether they can run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Properties of a machine that are known before any process is started."""

    device_type: Literal["cuda", "cpu"]
    device_count: int
    """Number of usable CUDA devices; 0 on a CPU machine."""
    cores: int
    """Number of logical CPU cores that this process may use."""
    device_names: tuple[str, ...] = ()
    has_bf16: bool = True
    """Hardware support of bf16: CUDA devices before Ampere compute it in fp32."""
    libraries: tuple[tuple[str, str], ...] = ()
    """Names and versions of the CUDA libraries that torch has loaded; empty without CUDA."""
    is_predicted: bool = False
    """True for a machine that `plan` only predicts: the libraries installed there are unknown."""

    @classmethod
    def predicted(cls, device_type: Literal["cuda", "cpu"], devices: int) -> Machine:
        """Return a predicted machine with so many devices, or cores."""
        return cls(device_type=device_type, device_count=devices, cores=devices, is_predicted=True)

    def times(self, nodes: int) -> Machine:
        """Return the combined properties of this many identical machines."""
        count, cores = self.device_count * nodes, self.cores * nodes
        return replace(self, device_count=count, cores=cores)
