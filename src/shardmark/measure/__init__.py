"""What is measured, and by whom: ranks mark, the sampler watches, the probe counts."""
