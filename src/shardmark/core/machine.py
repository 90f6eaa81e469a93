"""What may be asked of a machine before anything is started there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a strategy may ask of the machine before anything is started."""

    device_type: Literal["cuda", "cpu"]
    device_count: int
    """CUDA devices that can be used; 0 on a CPU machine."""
    cores: int
    """Logical CPU cores that this process may use."""
    device_names: tuple[str, ...] = ()
    has_bf16: bool = True
    """In hardware: CUDA devices before Ampere compute it in fp32."""
    libraries: tuple[tuple[str, str], ...] = ()
    """Of CUDA, by name with their versions, as torch has loaded them; empty where it has not."""

    def times(self, nodes: int) -> Machine:
        """So many machines like this one, taken together."""
        count, cores = self.device_count * nodes, self.cores * nodes
        return replace(self, device_count=count, cores=cores)
