"""The task `detection`: objects in pictures.  The table of tasks, which loads it, comes first."""

import shardmark.ranks.workloads  # noqa: F401
