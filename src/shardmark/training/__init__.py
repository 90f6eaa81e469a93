"""The loop, plain and short, and the rank that runs it."""
