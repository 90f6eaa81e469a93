"""The machine: its software, load, processes and GPUs."""
