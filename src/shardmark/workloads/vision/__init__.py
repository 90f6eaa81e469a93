"""Picture classification."""
