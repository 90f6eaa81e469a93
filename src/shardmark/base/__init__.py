"""Types shared by all parts.  Imports no torch."""
