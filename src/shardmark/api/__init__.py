"""Shardmark from Python: runs, and models that a notebook or a script defines."""
