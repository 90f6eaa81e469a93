"""Searches over layouts and batch sizes."""
