"""ZeroRedundancyOptimizer."""
