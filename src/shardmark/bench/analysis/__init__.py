"""Analysis of stored results: summaries, intervals, comparisons.  Imports no torch."""
