"""Folder that precedes others on the `PYTHONPATH` of an observed script."""
