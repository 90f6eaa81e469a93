"""The best strategy at each value of an axis, and where it changes."""
