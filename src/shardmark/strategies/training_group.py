"""How the training ranks meet outside of their steps."""

from __future__ import annotations

import torch.distributed as dist


class CollectiveGroup:
    """All ranks of the process group train."""

    def barrier(self) -> None:
        """Wait until every training rank is here."""
        dist.barrier()

    def gather(self, value: object) -> list[object]:
        """Every training rank's value in order of rank, on every one.  It must be picklable."""
        values: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values
