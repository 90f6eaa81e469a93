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
