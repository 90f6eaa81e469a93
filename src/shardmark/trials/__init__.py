"""From an experiment to its trials.  Imports no torch."""
