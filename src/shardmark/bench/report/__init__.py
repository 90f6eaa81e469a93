"""Tables as data, and the forms in which they are printed.  Imports no torch."""
