"""FullyShardedDataParallel, torch's first."""
