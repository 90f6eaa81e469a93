"""Expansion of an experiment into trials.  Imports no torch."""
