"""Views of comparisons, plans and largest batches as tables."""
