"""The experiment file and its presets.  Imports no torch."""
