"""Runs and comparisons: which strategy or variant is fastest, and which differences are real."""
