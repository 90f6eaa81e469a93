"""A training script of the user's, which Shardmark runs unchanged."""
