"""What the stored numbers say: summaries, intervals, comparisons.  Imports no torch."""
