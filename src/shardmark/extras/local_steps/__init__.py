"""Local steps."""
