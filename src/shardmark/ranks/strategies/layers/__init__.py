"""Layers divided over ranks that see the same samples: tensor parallelism and pipelines."""
