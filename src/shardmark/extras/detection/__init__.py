"""The task `detection`: objects in images.  The table of tasks, which loads it, comes first."""

import shardmark.ranks.workloads  # noqa: F401
