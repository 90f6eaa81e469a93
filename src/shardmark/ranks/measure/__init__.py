"""Measurement: ranks mark their steps, a sampler watches from outside, a probe counts."""
