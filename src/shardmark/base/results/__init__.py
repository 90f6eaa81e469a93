"""The files of a run: their schema, how they are written and read back.  Imports no torch."""
