"""The environment variable by which a launcher tells its ranks the experiment's device."""

DEVICE_TYPE_VARIABLE = "SHARDMARK_DEVICE_TYPE"
