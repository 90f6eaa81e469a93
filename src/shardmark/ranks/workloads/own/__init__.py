"""The user's own task."""
