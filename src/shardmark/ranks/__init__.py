"""The work of a rank: workloads, strategies, training, measurement."""
