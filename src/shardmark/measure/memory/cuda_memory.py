"""The CUDA allocator's peaks over the measured windows."""

from __future__ import annotations

import torch


class CudaPeak:
    """Largest allocated and reserved bytes of one device, inside the windows alone.

    Source: torch.cuda memory statistics; `allocated` is what tensors hold, `reserved` what the
    caching allocator keeps from the driver.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.allocated_bytes: int | None = None
        self.reserved_bytes: int | None = None

    def window_started(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def window_stopped(self) -> None:
        self.allocated_bytes = max(
            self.allocated_bytes or 0, torch.cuda.max_memory_allocated(self._device)
        )
        self.reserved_bytes = max(
            self.reserved_bytes or 0, torch.cuda.max_memory_reserved(self._device)
        )
