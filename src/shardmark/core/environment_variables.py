"""Environment variables by which launchers tell ranks their place."""

DEVICE_TYPE_VARIABLE = "SHARDMARK_DEVICE_TYPE"

NODE_VARIABLE = "SHARDMARK_NODE"
"""Tells a rank its node's number."""

FOLDER_VARIABLE = "SHARDMARK_CHECKPOINTS"
"""Tells a node's ranks their folder."""


LAUNCHED_VARIABLE = "SHARDMARK_LAUNCHED_AT"
"""Tells ranks the Unix time at which their launcher was started."""


RESTART_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
"""Set by the launcher, the same on every node."""

STORE_VARIABLE = "SHARDMARK_STORE"
"""Tells ranks the store at which they meet: `file PATH`, or `tcp HOST PORT PREFIX`."""

RENDEZVOUS_VARIABLE = "SHARDMARK_RENDEZVOUS"
"""Tells a node's launcher where those of all nodes meet, as JSON; unset with one node."""

SECRET_VARIABLE = "SHARDMARK_SECRET"
"""What all nodes of a run know, and nobody else."""

ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),  # the most that glibc learns, and allows
    "MALLOC_TRIM_THRESHOLD_": "-1",  # freed memory is kept for the next step
}
"""Set for all ranks unless the user has set them.

By default glibc learns both as it goes, so that by chance some processes hand their freed tensors
back to the system in every step and fault them in again: one was 8 % slower.
"""

ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
"""For the ranks of one machine, which nobody outside is to reach; the user's settings yield."""
