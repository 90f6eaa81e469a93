"""Parts that are loaded by name only."""
