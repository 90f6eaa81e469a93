"""How much memory a rank may still take."""

from __future__ import annotations

import resource

import psutil
import torch

from shardmark.measure.system.cgroup import cgroup_limits


def room_bytes(device: torch.device, processes: int) -> int:
    """Of the device and of the host, the lesser; `processes` share the host alike.

    The host's is what is available, less where the container's limit or RLIMIT_DATA is lower.
    """
    host = psutil.virtual_memory().available
    limit = cgroup_limits().memory_bytes
    room = [min(host, limit or host) // processes]
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        room.append(max(0, soft - psutil.Process().memory_info().data))
    if device.type == "cuda":
        room.append(torch.cuda.mem_get_info(device)[0])
    return min(room)
