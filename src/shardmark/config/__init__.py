"""What the user writes: the experiment file and its presets.  Imports no torch."""
