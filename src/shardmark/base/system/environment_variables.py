"""Names of the environment variables that launchers set for ranks."""

DEVICE_TYPE_VARIABLE = "SHARDMARK_DEVICE_TYPE"

NODE_VARIABLE = "SHARDMARK_NODE"
"""Number of the rank's node."""

STORE_VARIABLE = "SHARDMARK_STORE"
"""Store for the process groups of the ranks: `file PATH`, or `tcp HOST PORT PREFIX`."""

RENDEZVOUS_VARIABLE = "SHARDMARK_RENDEZVOUS"
"""Address of the store of several nodes, for a node's agent, as JSON; unset for one node."""

SECRET_VARIABLE = "SHARDMARK_SECRET"
"""Secret key that the nodes of a run share."""

ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),  # the largest value that glibc allows
    "MALLOC_TRIM_THRESHOLD_": "-1",  # freed memory stays with the process
}
"""Allocator settings for all ranks; settings of the user take precedence.

By default glibc adapts both values at run time.  Some processes then return freed tensors to the
system in every step and fault the pages in again, which made one process 8 % slower.
"""

ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
"""Loopback interface for the ranks of a single machine, which other hosts cannot reach.  These
settings override the user's."""
